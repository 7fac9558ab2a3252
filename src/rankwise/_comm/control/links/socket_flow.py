"""A transfer of data of one group over the connections of the session."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from rankwise._comm.control.flow import Flow
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import AbandonedDataError
from rankwise._net.polling import READABLE, WRITABLE, poll

# The wait while a connection transfers data of another group, in another thread.
_BUSY_SECONDS: Final = 0.001


class SocketFlow(Flow):
    """Such a transfer, of one thread."""

    def __init__(
        self, links: Links, group: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]
    ) -> None:
        """Begin a transfer.

        Args:
            links: The connections.
            group: The id of the group.
            outgoing: The data for each rank.
            incoming: The buffer for the data of each rank.
        """
        self.abandoned: set[int] = set()
        self._unsent = dict(outgoing)
        self._unfilled = dict(incoming)
        self._links = links
        self._group = group
        self._ranks = {*outgoing, *incoming}
        self._begun: set[int] = set()
        links.count_transfers(1)

    @property
    def pending(self) -> AbstractSet[int]:
        return self._unsent.keys() | self._unfilled.keys()

    def step(self) -> int:
        moved = 0
        for rank, data in list(self._unsent.items()):
            peer = self._links.peer(rank)
            sent = peer.send_data(self._group, data, is_begun=rank in self._begun)
            if sent is None:
                continue
            self._begun.add(rank)
            moved += sent
            self._unsent[rank] = data[sent:]
            if not peer.is_sending(self._group):
                del self._unsent[rank]
        for rank, buffer in list(self._unfilled.items()):
            if rank in self.abandoned:
                continue
            try:
                received, is_complete = self._links.peer(rank).receive_data(self._group, buffer)
            except AbandonedDataError:
                self.abandoned.add(rank)
                continue
            moved += received
            self._unfilled[rank] = buffer[received:]
            if is_complete:
                del self._unfilled[rank]
        return moved

    def wait(self, seconds: float) -> None:
        links = self._links
        events, is_busy = self._events()
        if links.page is not None:  # a rank that is lost is noticed by the event loop
            events[links.loop.fileno()] = READABLE
        ready = poll(events, _BUSY_SECONDS if is_busy else seconds)
        if links.page is not None and any(number == links.loop.fileno() for number, _ in ready):
            links.loop.wait(links.loop.num_events, 0.0)

    def end(self) -> None:
        """Send zeros for the rest of data that was announced, and let the event loop read frames again."""
        self._links.count_transfers(-1)
        for rank in self._unsent:
            self._links.peer(rank).abandon_data(self._group)
        self._links.resume(self._ranks)

    def _events(self) -> tuple[dict[int, int], bool]:
        """Return the events to wait for, and whether another group's data is in the way of some of them."""
        events: dict[int, int] = {}
        is_busy = self._links.num_transfers > 1  # another thread may read data of this group, and keep it
        for rank in self.pending:
            peer = self._links.peer(rank)
            if peer.lost_reason:
                continue
            reads = rank in self._unfilled
            writes = rank in self._begun and rank in self._unsent
            is_busy = is_busy or (rank in self._unsent and not writes)
            if reads or writes:
                events[peer.connection.fileno()] = (READABLE if reads else 0) | (WRITABLE if writes else 0)
        return events, is_busy
