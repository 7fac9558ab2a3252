"""A channel over the connections of the session: every member sends its frame to every other one.

For members on several hosts, for ranks that are threads of one process, and where a host has no page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rankwise._comm.control.channel import Channel, Exchange
from rankwise._comm.control.links import SLICE_SECONDS, Links
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict, conclude
from rankwise.errors import CollectiveTimeoutError

# With more unsent bytes than this for one member, posting a frame waits for that member.
_MAX_UNSENT_BYTES: Final = 1 << 20


class SocketChannel(Channel):
    """The exchanges of one group, over connections between all of its members."""

    def __init__(self, group: int, ranks: Sequence[int], links: Links) -> None:
        super().__init__(group, ranks, links)
        self._peers = {member: links.peer(rank) for member, rank in enumerate(ranks) if rank != links.rank}

    @property
    def same_host(self) -> bool:
        return not any(peer.host for peer in self._peers.values())

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self._require_open(frame.call)
        self._number(frame)
        self._refresh()  # members that only post would otherwise fill each other's connections
        for peer in self._peers.values():
            peer.inbox(self.group).discard_before(self.sequence)
        self._post_to_all(frame)
        start = time.monotonic()
        while timeout is not None and (
            slow := [peer.name for peer in self._peers.values() if peer.num_unsent > _MAX_UNSENT_BYTES]
        ):
            if time.monotonic() - start > timeout:
                raise CollectiveTimeoutError(f"{frame.call}: {', '.join(slow)} read nothing for {timeout:g} s")
            self._require_open(frame.call)
            self._wait(self._links.loop.num_events, SLICE_SECONDS)

    def pending_call(self, rank: int) -> Frame | None:
        peer = next((peer for peer in self._peers.values() if peer.rank == rank), None)
        if peer is None:
            return None
        self._links.receive(peer)
        frame = peer.inbox(self.group).frames.get(self.sequence + 1)
        lost = peer.lost_reason or peer.inbox(self.group).left
        return frame if frame is not None and frame.kind is FrameKind.CALL and not lost else None

    def lost_reason(self, member: int) -> str:
        if member == self.own:
            return ""
        peer = self._peers[member]
        return peer.inbox(self.group).left or peer.lost_reason

    def _leave(self, reason: str) -> None:
        frame = Frame(FrameKind.LEFT, reason, group=self.group, sequence=self.sequence)
        self._post_to_all(frame)

    def _free(self) -> None:
        for peer in self._peers.values():
            peer.forget(self.group)

    def _exchange(self, exchange: Exchange) -> Verdict:
        frame = exchange.frame
        self._number(frame)
        for peer in self._peers.values():
            peer.inbox(self.group).discard_before(self.sequence)
            if self.sequence in peer.inbox(self.group).frames:
                self._links.receive(peer)  # its frame came early; its timeout may have expired since
        self._post_to_all(frame)
        self._await_frames(exchange)
        found = {member: peer.inbox(self.group).frames.pop(self.sequence, None) for member, peer in self._peers.items()}
        frames = {self.own: frame} | {member: other for member, other in found.items() if other is not None}
        verdict = conclude(self.ranks, frames, exchange.combine)
        if verdict.outcome is Outcome.AGREED:
            verdict.bodies = {member: frames[member].body for member in exchange.read}
        return verdict

    def _await_frames(self, exchange: Exchange) -> None:
        """Wait until every member's frame of this exchange is here, or one of them ends the exchange."""
        loop = self._links.loop
        while True:
            seen = loop.num_events
            self._require_open(exchange.frame.call)
            inboxes = [peer.inbox(self.group) for peer in self._peers.values()]
            # A timeout on one member ends the exchange for all, even for one that has all frames by now: if it went on
            # to its data, it would wait for the member that has raised.
            expired = next((text for inbox in inboxes if (text := inbox.timeouts.get(self.sequence))), None)
            if expired is not None:
                raise CollectiveTimeoutError(expired)
            frames = [inbox.frames.get(self.sequence) for inbox in inboxes]
            late = [member for member, frame in zip(self._peers, frames, strict=True) if frame is None]
            # Frames that are not sent completely are waited for as well: nothing else would send the rest of them.
            if not late and not any(peer.num_unsent for peer in self._peers.values()):
                return
            # A failed rank is reported before a lost one: it may exit because of its failure, and that is the cause.
            if any(frame is not None and frame.kind is FrameKind.FAILED for frame in frames):
                return
            if any(self.lost_reason(member) for member in late):
                self._refresh()  # for a member that left because of another one
                raise self._lost_error(exchange.frame.call, [member for member in late if self.lost_reason(member)])
            if exchange.is_expired:
                error = self._timeout_error(exchange, late)
                self._post_to_all(Frame(FrameKind.TIMED_OUT, str(error), group=self.group, sequence=self.sequence))
                raise error
            if not self._wait(seen, exchange.pause()):
                exchange.on_pause([self.ranks[member] for member in late])

    def _number(self, frame: Frame) -> None:
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence = self.group, self.sequence

    def _post_to_all(self, frame: Frame) -> None:
        for peer in self._peers.values():
            peer.post(frame)

    def _wait(self, seen: int, seconds: float) -> bool:
        """Wait until frames can be sent or received, and do so; False if the time expired."""
        for peer in self._peers.values():
            self._links.update_interest(peer)
        return self._links.loop.wait(seen, seconds)

    def _refresh(self) -> None:
        for peer in self._peers.values():
            self._links.receive(peer)

    def _last_call(self, member: int) -> str:
        return self._peers[member].inbox(self.group).last_call if member in self._peers else ""
