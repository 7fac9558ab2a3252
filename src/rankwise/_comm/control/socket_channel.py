"""A channel over the connections of the session.

For members on several hosts, for ranks that are threads of one process, and where a host has no page. What a member
sends, and what follows from what it has received, is decided in `exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from rankwise._comm.control.channel import Channel, Part
from rankwise._comm.control.exchange import Exchange, Tree
from rankwise._comm.control.flow import SLICE_SECONDS
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.page.layout import ARRIVALS
from rankwise._comm.control.protocol import WAITING_KINDS, Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise.errors import CollectiveTimeoutError

# With more unsent bytes than this for one member, posting a frame waits for that member.
_MAX_UNSENT_BYTES: Final = 1 << 20
# How long posting waits until a member has read what fills its connection.
_FLUSH_SECONDS: Final = 0.2


class SocketChannel(Channel):
    """The exchanges of one group, over connections between all of its members."""

    def __init__(self, group: int, ranks: Sequence[int], links: Links) -> None:
        super().__init__(group, ranks, links)
        self._peers = {member: links.peer(rank) for member, rank in enumerate(ranks) if rank != links.rank}
        self._inboxes = {member: peer.inbox(group) for member, peer in self._peers.items()}
        self._tree = Tree(self.own, [links.host(rank) for rank in ranks])
        self._arrivals: dict[int, list[float]] = {}  # at all exchanges but the last; on the root alone
        self._ended = self._waited = 0.0

    @property
    def same_host(self) -> bool:
        return not any(peer.host for peer in self._peers.values())

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self._require_open(frame.call)
        self._number(frame)
        self._refresh()  # members that only post would otherwise fill each other's connections
        # Data before it may have filled a connection, and this thread may not come back to send the rest. So it waits a
        # moment for members that read; not again for one that did not.
        have_read = not self._unread(0)
        self._post_to(self._peers, frame)
        if timeout is None:
            return
        if have_read:
            self._await_readers(frame.call, 0, min(_FLUSH_SECONDS, timeout))
        slow = self._await_readers(frame.call, _MAX_UNSENT_BYTES, timeout)
        if slow:
            names = ", ".join(self._peers[member].name for member in slow)
            raise CollectiveTimeoutError(f"{frame.call}: {names} read nothing for {timeout:g} s")

    def _unread(self, num_bytes: int) -> list[int]:
        """Return the members for which more bytes than this wait to be sent."""
        return [member for member, peer in self._peers.items() if peer.num_unsent > num_bytes]

    def _await_readers(self, call: str, num_bytes: int, seconds: float) -> list[int]:
        """Wait at most so long until no more bytes wait for any member, and return those for which more do."""
        start = time.monotonic()
        while (slow := self._unread(num_bytes)) and elapsed_since(start) <= seconds:
            self._require_open(call)
            self._wait(self._links.loop.num_events, min(SLICE_SECONDS, seconds))
        return slow

    def pending_call(self, rank: int) -> Frame | None:
        peer = next((peer for peer in self._peers.values() if peer.rank == rank), None)
        if peer is None:
            return None
        self._links.receive(peer)
        inbox = peer.inbox(self.group)
        frame = inbox.frames.get(self.sequence + 1) or inbox.arrivals.get(self.sequence + 1)
        is_call = frame is not None and frame.kind in (FrameKind.CALL, FrameKind.ARRIVED)
        return frame if is_call and not peer.lost_reason and not inbox.left else None

    def lost_reason(self, member: int) -> str:
        if member == self.own:
            return ""
        return self._inboxes[member].left or self._peers[member].lost_reason

    def _arrivals_at(self, sequence: int) -> list[float]:
        return self._arrivals.get(sequence, [])

    def _leave(self, reason: str) -> None:
        self._post_to(self._peers, Frame(FrameKind.LEFT, reason, group=self.group, sequence=self.sequence))

    def _free(self) -> None:
        for peer in self._peers.values():
            peer.forget(self.group)

    def _exchange(self, part: Part) -> Verdict:
        frame = part.frame
        frame.reads = bool(part.read)
        self._number(frame)
        exchange = Exchange(
            frame,
            ranks=self.ranks,
            tree=self._tree,
            inboxes=self._inboxes,
            combine=part.combine,
            timeout=part.timeout,
        )
        verdict = self._await_verdict(part, exchange)
        if verdict.outcome is Outcome.AGREED:
            frames = exchange.frames() if part.read or self._tree.is_root else {}
            if self._tree.is_root:
                # All members have left the exchange before at about the same time; their clocks may differ. When frames
                # are received says less: those that have waited for this member are read at once.
                self._arrivals[self.sequence - 1] = [
                    self._ended - frames[member].waited for member in range(len(self.ranks))
                ]
                self._arrivals.pop(self.sequence - ARRIVALS, None)
            verdict.bodies = {member: frames[member].body for member in part.read}
            for inbox in self._inboxes.values():
                inbox.set_entered(self.sequence, frame.call)
        self._discard_before(self.sequence + 1)
        self._ended = time.monotonic()
        self._waited = self._ended - part.start
        return verdict

    def _await_verdict(self, part: Part, exchange: Exchange) -> Verdict:
        """Send and receive until the exchange is over, and what this member sends is sent."""
        if exchange.is_complete:
            self._refresh()  # all frames came early; an error may have come since
        while True:
            seen = self._links.loop.num_events
            self._require_open(part.frame.call)
            verdict = exchange.step(part.waited)
            if verdict is None:
                self._end_if_in_vain(part, exchange)
            for members, frame in exchange.take_outgoing():
                self._post_to(members, frame)
            # Frames that are not sent completely are waited for as well: nothing else would send the rest of them.
            unread = self._unread(0)
            if verdict is not None and (verdict.outcome is Outcome.ERROR or not unread):
                return verdict
            if verdict is not None and part.waited > part.timeout:
                return Verdict(Outcome.ERROR, error=self._timeout_error(part, unread))
            pause = min(part.pause(), exchange.longest_wait(part.waited))
            if not self._wait(seen, pause) and verdict is None:
                self._wait_longer(part, self._present(exchange.surely_late(part.waited)))

    def _end_if_in_vain(self, part: Part, exchange: Exchange) -> None:
        """End the exchange for all members if one is lost, or has not come in time."""
        lost = exchange.lost(part.waited, self.lost_reason)
        if lost:
            exchange.end(self._lost_error(part.frame.call, lost), part.waited)
        elif part.waited > part.timeout and not exchange.is_ended:
            exchange.end(self._timeout_error(part, exchange.late() or exchange.blocking()), part.waited)

    def _present(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if not self.lost_reason(member)]

    def _number(self, frame: Frame) -> None:
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence, frame.waited = self.group, self.sequence, self._waited
        self._discard_before(self.sequence)

    def _discard_before(self, sequence: int) -> None:
        for inbox in self._inboxes.values():
            inbox.discard_before(sequence)

    def _post_to(self, members: Iterable[int], frame: Frame) -> None:
        for member in members:
            self._peers[member].post(frame)

    def _wait(self, seen: int, seconds: float) -> bool:
        """Wait until frames can be sent or received, and do so; False if the time expired."""
        return self._links.wait(self._peers.values(), seen, seconds)

    def _refresh(self) -> None:
        for peer in self._peers.values():
            self._links.receive(peer)

    def _entered(self, member: int) -> tuple[str, int, float] | None:
        # Members wait for this rank in the exchanges that it has not finished. `copy`: another thread may add frames.
        inbox = self._inboxes[member]
        first = self.sequence if self.lock.locked() else self.sequence + 1
        last = max(
            (frame for frame in (inbox.arrivals.copy() | inbox.frames.copy()).values() if frame.sequence >= first),
            key=lambda frame: frame.sequence,
            default=None,
        )
        if last is None or last.kind not in WAITING_KINDS or inbox.left:
            return None
        if any(last.sequence in other.errors for other in self._inboxes.values()):
            return None
        return last.call, last.sequence, last.arrived

    def _last_call(self, member: int) -> str:
        return self._inboxes[member].last_call if member != self.own else ""
