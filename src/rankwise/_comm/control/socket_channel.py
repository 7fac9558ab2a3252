"""A channel over the connections of the session.

For members on several hosts, for ranks that are threads of one process, and where a host has no page. Frames go
through the leaders of the hosts (`Route`). A member that has waited for a moment announces itself to every other one:
so each of them knows which ones are missing, whatever has become of the leaders.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from rankwise._comm.control.channel import Channel, Exchange
from rankwise._comm.control.links.links import SLICE_SECONDS, Links
from rankwise._comm.control.links.transfer import LOSS_SECONDS
from rankwise._comm.control.protocol import WAITING_KINDS, Frame, FrameKind, decode_bundle, encode_bundle
from rankwise._comm.control.verdict import Outcome, Verdict, conclude
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise.errors import CollectiveError, CollectiveTimeoutError

# Up to this size each member sends its frame to every other one, as if each were on a host of its own: that takes fewer
# steps one after the other.
MAX_DIRECT_SIZE: Final = 4

# With more unsent bytes than this for one member, posting a frame waits for that member.
_MAX_UNSENT_BYTES: Final = 1 << 20
# How long a member waits before it announces itself to all members.
_ANNOUNCE_SECONDS: Final = 0.05
# After so long, a leader that has not announced itself is not in the exchange.
_LEADER_SECONDS: Final = 1.0


class Route:
    """The members through which a member of a group sends and receives frames, all by group rank.

    Attributes:
        leader: The leader of its host.
        neighbours: The other members on its host.
        other_leaders: The leaders of the other hosts.
    """

    def __init__(self, ranks: Sequence[int], own: int, host: Callable[[int], str]) -> None:
        """Find the way of the frames of a group.

        Args:
            ranks: The global ranks of the members, by group rank.
            own: The group rank of this process.
            host: Returns the id of the host of a global rank.
        """
        hosts = [host(rank) for rank in ranks] if len(ranks) > MAX_DIRECT_SIZE else [str(rank) for rank in ranks]
        self._leader_of = [hosts.index(name) for name in hosts]
        self._own = own
        self.leader = self._leader_of[own]
        self.neighbours = [member for member, name in enumerate(hosts) if name == hosts[own] and member != own]
        self.other_leaders = sorted(set(self._leader_of) - {self.leader})

    @property
    def is_leader(self) -> bool:
        """This member leads its host."""
        return self.leader == self._own

    def source(self, member: int) -> int:
        """Return the member from which this one receives the frame of another one."""
        if not self.is_leader:
            return self.leader
        return member if member in self.neighbours else self._leader_of[member]


class SocketChannel(Channel):
    """The exchanges of one group, over connections between all of its members."""

    def __init__(self, group: int, ranks: Sequence[int], links: Links) -> None:
        super().__init__(group, ranks, links)
        self._peers = {member: links.peer(rank) for member, rank in enumerate(ranks) if rank != links.rank}
        self._inboxes = {member: peer.inbox(group) for member, peer in self._peers.items()}
        self._route = Route(ranks, self.own, links.host)
        # In the current exchange: the members to which this one has sent its frame; whether it has sent the frames of
        # its host to the other leaders, and all frames to its host; and when it noticed that a member is lost.
        self._sent_to: set[int] = set()
        self._has_sent_host = self._has_sent_all = False
        self._lost_since = 0.0

    @property
    def same_host(self) -> bool:
        return not any(peer.host for peer in self._peers.values())

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self._require_open(frame.call)
        self._number(frame)
        self._refresh()  # members that only post would otherwise fill each other's connections
        self._post_to(self._peers, frame)
        start = time.monotonic()
        while timeout is not None and (
            slow := [peer.name for peer in self._peers.values() if peer.num_unsent > _MAX_UNSENT_BYTES]
        ):
            if elapsed_since(start) > timeout:
                raise CollectiveTimeoutError(f"{frame.call}: {', '.join(slow)} read nothing for {timeout:g} s")
            self._require_open(frame.call)
            self._wait(self._links.loop.num_events, SLICE_SECONDS)

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

    def _leave(self, reason: str) -> None:
        self._post_to(self._peers, Frame(FrameKind.LEFT, reason, group=self.group, sequence=self.sequence))

    def _free(self) -> None:
        for peer in self._peers.values():
            peer.forget(self.group)

    def _exchange(self, exchange: Exchange) -> Verdict:
        frame = exchange.frame
        self._number(frame)
        self._sent_to, self._has_sent_host, self._has_sent_all, self._lost_since = set(), False, False, 0.0
        if not self._route.is_leader:
            self._send_to([self._route.leader], frame)
        self._await_frames(exchange)
        frames = {self.own: frame}
        for member, inbox in self._inboxes.items():
            other = inbox.frames.get(self.sequence) or inbox.arrivals.get(self.sequence)
            if other is not None:
                frames[member] = other
        verdict = conclude(self.ranks, frames, exchange.combine)
        if verdict.outcome is Outcome.AGREED:
            verdict.bodies = {member: frames[member].body for member in exchange.read}
        self._discard_before(self.sequence + 1)
        return verdict

    def _await_frames(self, exchange: Exchange) -> None:
        """Wait until every member's frame of this exchange is here, or one of them ends the exchange."""
        announce_after = min(_ANNOUNCE_SECONDS, exchange.timeout / 2)
        has_looked = False
        while True:
            seen = self._links.loop.num_events
            self._require_open(exchange.frame.call)
            if self._is_over(exchange.frame):
                if has_looked:
                    return
                self._refresh()  # all frames came early; an error may have come since
                has_looked = True
                continue
            lost = self._lost(exchange)
            if lost:
                raise self._ended(self._lost_error(exchange.frame.call, lost))
            late, has_looked = self._late(), True
            if exchange.waited > exchange.timeout:
                raise self._ended(self._timeout_error(exchange, late or self._blocking()))
            if exchange.waited > announce_after:
                self._announce(exchange.frame)
            pause = min(exchange.pause(), max(announce_after, exchange.waited))
            if not self._wait(seen, min(pause, LOSS_SECONDS) if self._lost_since else pause):
                self._wait_longer(exchange, self._surely_missing(exchange, late))

    def _is_over(self, own: Frame) -> bool:
        """Forward what has arrived, and return whether this member waits for nothing any more in this exchange."""
        for inbox in self._inboxes.values():
            # An error of one member ends the exchange for all, even for one that has all frames by now: if it went on
            # to its data, it would wait for the member that has raised.
            if inbox.errors and (error := inbox.errors.get(self.sequence)) is not None:
                raise error
            if inbox.bundles and (bundle := inbox.bundles.pop(self.sequence, None)) is not None:
                self._unbundle(bundle)
        frames = [inbox.frames.get(self.sequence) for inbox in self._inboxes.values()]
        kinds = {frame.kind for frame in frames if frame is not None}
        # A failed rank is reported before a lost one: it may exit because of its failure, and that is the cause.
        if FrameKind.FAILED in kinds:
            return True
        if FrameKind.WAITING_IN_OTHER_GROUP in kinds:  # the deadlock is reported with the calls of all members
            return not self._late()
        incomplete = self._incomplete() if None in frames else []
        if self._route.is_leader:
            self._forward(own, incomplete)
        # Frames that are not sent completely are waited for as well: nothing else would send the rest of them.
        return not incomplete and not any(peer.num_unsent for peer in self._peers.values())

    def _incomplete(self) -> list[int]:
        """Return the members whose frame of this exchange is not here."""
        return [member for member, inbox in self._inboxes.items() if self.sequence not in inbox.frames]

    def _late(self) -> list[int]:
        """Return the members that are not known to have entered this exchange."""
        return [member for member in self._incomplete() if self._inboxes[member].last_sequence < self.sequence]

    def _blocking(self) -> list[int]:
        """Return the members that should have forwarded frames, or have not read those of this one."""
        unread = {member for member, peer in self._peers.items() if peer.num_unsent}
        return sorted({self._route.source(member) for member in self._incomplete()} | unread)

    def _forward(self, own: Frame, late: Collection[int]) -> None:
        """Send the frames that have arrived at this leader to the members that receive them from it."""
        neighbours, other_leaders = self._route.neighbours, self._route.other_leaders
        if not self._has_sent_host and not any(member in late for member in neighbours):
            self._has_sent_host = True
            if neighbours and other_leaders:
                self._post_to(other_leaders, self._bundle(own, neighbours))
                self._sent_to.update(other_leaders)
            else:
                self._send_to(other_leaders, own)
        if neighbours and not self._has_sent_all and not late:
            self._has_sent_all = True
            self._post_to(neighbours, self._bundle(own, self._peers))

    def _bundle(self, own: Frame, members: Iterable[int]) -> Frame:
        """Return the frame with this member's frame and those of some others, which have arrived."""
        frames = {self.own: own} | {member: self._inboxes[member].frames[self.sequence] for member in members}
        return Frame(FrameKind.BUNDLE, "", body=encode_bundle(frames), group=self.group, sequence=self.sequence)

    def _unbundle(self, bundle: Frame) -> None:
        """Store the frames that a leader has forwarded."""
        for member, frame in decode_bundle(bundle.body).items():
            if member != self.own and self.sequence not in self._inboxes[member].frames:
                self._inboxes[member].store(frame)

    def _lost(self, exchange: Exchange) -> list[int]:
        """Return the members that are gone, for whose frames this one would wait in vain."""
        lost = set()
        for member in self._incomplete():
            source, inbox = self._route.source(member), self._inboxes[member]
            if self.lost_reason(source):
                lost |= {source, member} if self.lost_reason(member) else {source}
            elif self.lost_reason(member) and self._inboxes[source].last_sequence < self.sequence:
                # Its leader, which has not come yet, will have its frame if it left after it had entered the exchange.
                lost |= set() if inbox.left and inbox.last_sequence >= self.sequence else {member}
        if not lost:
            self._lost_since = 0.0
            return []
        # Its last frames, or those of the member because of which it left, may be on the way.
        self._lost_since = self._lost_since or time.monotonic()
        is_final = exchange.waited > exchange.timeout or time.monotonic() - self._lost_since > LOSS_SECONDS
        return sorted(lost) if is_final else []

    def _surely_missing(self, exchange: Exchange, late: Sequence[int]) -> Sequence[int]:
        """Return those late members that have neither finished this exchange nor wait in it, nor left the group."""
        late = [member for member in late if not self.lost_reason(member)]
        leader = self._route.leader
        # A member that has finished was late for nobody; its frame may be at the leader, which looks for deadlocks too.
        if self._route.is_leader or exchange.waited > _LEADER_SECONDS:
            return late
        return [leader] if leader in late else []

    def _number(self, frame: Frame) -> None:
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence = self.group, self.sequence
        self._discard_before(self.sequence)

    def _discard_before(self, sequence: int) -> None:
        for inbox in self._inboxes.values():
            inbox.discard_before(sequence)

    def _announce(self, own: Frame) -> None:
        """Send all members that have not got this member's frame from it that it is in this exchange."""
        self._send_to(self._peers, replace(own, kind=FrameKind.ARRIVED, body=b""))

    def _send_to(self, members: Iterable[int], frame: Frame) -> None:
        """Send this member's frame to those members to which it has not been sent."""
        missing = set(members) - self._sent_to
        self._post_to(missing, frame)
        self._sent_to |= missing

    def _post_to(self, members: Iterable[int], frame: Frame) -> None:
        for member in members:
            self._peers[member].post(frame)

    def _ended(self, error: CollectiveError) -> CollectiveError:
        """Send an error that ends the exchange to all members, and return it."""
        body = pickle.dumps(error)
        self._post_to(self._peers, Frame(FrameKind.ENDED, "", body=body, group=self.group, sequence=self.sequence))
        return error

    def _wait(self, seen: int, seconds: float) -> bool:
        """Wait until frames can be sent or received, and do so; False if the time expired."""
        for peer in self._peers.values():
            self._links.update_interest(peer)
        return self._links.loop.wait(seen, seconds)

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
