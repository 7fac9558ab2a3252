"""Transfers of data between ranks, over the connections of the session, as part of a collective of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from rankwise._comm.control.links.links import SLICE_SECONDS, Links
from rankwise._comm.control.links.peer import AbandonedDataError
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._net.polling import READABLE, WRITABLE, poll
from rankwise.errors import CollectiveError, CollectiveTimeoutError

# After a lost connection, wait so long for what may be on the way: its last frames, or the end of the member because of
# which it left.
LOSS_SECONDS: Final = 0.1
# The wait while a connection transfers data of another group, in another thread.
_BUSY_SECONDS: Final = 0.001


def transfer(
    links: Links,
    group: int,
    outgoing: Mapping[int, memoryview],
    incoming: Mapping[int, memoryview],
    *,
    call: str,
    timeout: float,
    lost_reason: Callable[[int], str],
    require_open: Callable[[], None],
) -> None:
    """Send data to ranks and fill buffers with theirs; both sides know the lengths.

    Args:
        links: The connections.
        group: The id of the group.
        outgoing: The data for each rank.
        incoming: The buffer for the data of each rank.
        call: The call, for error messages.
        timeout: Seconds without a byte sent or received.
        lost_reason: Returns why a rank takes part in the group no longer; "" if it does.
        require_open: Raises if this rank has left the group.

    Raises:
        CollectiveError: A rank is gone, or this rank has left the group in another thread.
        CollectiveTimeoutError: No byte was sent or received for that long.
    """
    move = _Transfer(links, group, outgoing, incoming)
    last_progress, lost_since = time.monotonic(), 0.0
    try:
        while move.unsent or move.unfilled:
            require_open()
            if move.step():
                last_progress = time.monotonic()
                continue
            pending = sorted(move.unsent.keys() | move.unfilled.keys())
            lost = {rank: why for rank in pending if (why := links.lost_reason(rank) or lost_reason(rank))}
            lost |= dict.fromkeys(move.abandoned - lost.keys(), "left the group in the middle of its data")
            if lost and time.monotonic() - (lost_since := lost_since or time.monotonic()) > LOSS_SECONDS:
                reasons = "; ".join(f"{links.name(rank)} {why}" for rank, why in lost.items())
                raise CollectiveError(f"{call} failed: {reasons}")
            if elapsed_since(last_progress) > timeout:
                slow = ", ".join(map(links.name, pending))
                raise CollectiveTimeoutError(f"{call}: no data from or to {slow} for {timeout:g} s")
            move.wait(LOSS_SECONDS if lost else SLICE_SECONDS)
    finally:
        move.end()


class _Transfer:
    """A transfer of data of one group.

    Attributes:
        unsent: The rest of the data for each rank.
        unfilled: The rest of the buffer for the data of each rank.
        abandoned: The ranks that have left the group in the middle of their data.
    """

    def __init__(
        self, links: Links, group: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]
    ) -> None:
        self.unsent = dict(outgoing)
        self.unfilled = dict(incoming)
        self.abandoned: set[int] = set()
        self._links = links
        self._group = group
        self._ranks = {*outgoing, *incoming}
        self._begun: set[int] = set()
        links.count_transfers(1)

    def step(self) -> int:
        """Send and receive as much as possible without waiting, and return the number of bytes."""
        moved = 0
        for rank, data in list(self.unsent.items()):
            peer = self._links.connected(rank)
            sent = None if peer is None else peer.send_data(self._group, data, is_begun=rank in self._begun)
            if sent is None:
                continue
            self._begun.add(rank)
            moved += sent
            self.unsent[rank] = data[sent:]
            if peer is not None and not peer.is_sending(self._group):
                del self.unsent[rank]
        for rank, buffer in list(self.unfilled.items()):
            peer = self._links.connected(rank)
            if peer is None or rank in self.abandoned:
                continue
            try:
                received, is_complete = peer.receive_data(self._group, buffer)
            except AbandonedDataError:
                self.abandoned.add(rank)
                continue
            moved += received
            self.unfilled[rank] = buffer[received:]
            if is_complete:
                del self.unfilled[rank]
        return moved

    def wait(self, seconds: float) -> None:
        """Wait until data may be sent or received, a rank may connect, or one may be lost."""
        links = self._links
        events, is_busy = self._events()
        if links.page is not None:  # a rank that is lost is noticed by the event loop
            events[links.loop.fileno()] = READABLE
            if links.listener is not None and self._awaits_connection():
                events |= dict.fromkeys((links.listener, *links.unidentified), READABLE)
        ready = poll(events, _BUSY_SECONDS if is_busy else seconds)
        if links.page is not None and any(number == links.loop.fileno() for number, _ in ready):
            links.loop.wait(links.loop.num_events, 0.0)

    def end(self) -> None:
        """Send zeros for the rest of data that was announced, and let the event loop read frames again."""
        self._links.count_transfers(-1)
        for rank in self.unsent:
            peer = self._links.existing(rank)
            if peer is not None:
                peer.abandon_data(self._group)
        self._links.resume(self._ranks)

    def _events(self) -> tuple[dict[int, int], bool]:
        """Return the events to wait for, and whether another group's data is in the way of some of them."""
        events: dict[int, int] = {}
        is_busy = self._links.num_transfers > 1  # another thread may read data of this group, and keep it
        for rank in self.unsent.keys() | self.unfilled.keys():
            peer = self._links.connected(rank)
            if peer is None or peer.lost_reason:
                is_busy = is_busy or (peer is None and rank < self._links.rank)
                continue
            reads = rank in self.unfilled
            writes = rank in self._begun and rank in self.unsent
            is_busy = is_busy or (rank in self.unsent and not writes)
            if reads or writes:
                events[peer.connection.fileno()] = (READABLE if reads else 0) | (WRITABLE if writes else 0)
        return events, is_busy

    def _awaits_connection(self) -> bool:
        """Return whether a higher rank has not connected yet."""
        ranks = self.unsent.keys() | self.unfilled.keys()
        return any(rank > self._links.rank and self._links.connected(rank) is None for rank in ranks)
