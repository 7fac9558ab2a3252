"""An exchange over connections, as one member sees it: what has arrived, what it has to send, and the verdict. No I/O.

The members form a `Tree`. The frames of their calls go up, from the members of a host to its leader and on to the first
member of the group, the root; it computes the verdict, which goes down the same way. What must not wait for the tree
goes from a member to every other one: its failure, that it has ended the exchange, and, after a moment of waiting, that
it is there. So each member knows which ones are missing, whatever has become of those above it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rankwise._comm.control.flow import LOSS_SECONDS
from rankwise._comm.control.protocol import (
    Frame,
    FrameKind,
    decode_bundle,
    encode_bundle,
    read_report,
    without_traceback,
)
from rankwise._comm.control.verdict import Combine, Outcome, Verdict, conclude
from rankwise.errors import CollectiveError

# Up to this size all members are below the root, as if each were on a host of its own: that takes fewer steps one after
# the other.
MAX_STAR_SIZE: Final = 4
# So many leaders of other hosts are below each one.
FAN_OUT: Final = 16
# How long a member waits before it announces itself to all members.
_ANNOUNCE_SECONDS: Final = 0.05
# After so long, a member that has not announced itself is not in the exchange.
_ANNOUNCED_SECONDS: Final = 1.0
# The number of exchanges that a member may be ahead before tracebacks of its failures are dropped. Only a member that
# fails in each of them gets so far, since all others wait for this rank.
_MAX_TRACEBACKS: Final = 1000
_WITHOUT_CALL: Final = frozenset({FrameKind.LEFT, FrameKind.ENDED, FrameKind.BUNDLE})


@dataclass(slots=True)
class Inbox:
    """What another member has sent for the exchanges of a group, by sequence number, until this rank comes to them.

    Attributes:
        frames: Its own frames.
        arrivals: Its announcements that it is in an exchange, without bodies.
        bundles: The frames of other members.
        verdicts: The verdicts of the root.
        errors: The errors by which it has ended exchanges for all members.
        first_sequence: The first exchange that this rank has not finished.
        last_sequence: The last exchange that it is known to have entered.
        last_call: The call in which it was seen last.
        left: The reason why it takes part in no further exchange; "" if it does.
    """

    frames: dict[int, Frame] = field(default_factory=dict)
    arrivals: dict[int, Frame] = field(default_factory=dict)
    bundles: dict[int, Frame] = field(default_factory=dict)
    verdicts: dict[int, Frame] = field(default_factory=dict)
    errors: dict[int, Frame] = field(default_factory=dict)
    first_sequence: int = 0
    last_sequence: int = 0
    last_call: str = ""
    left: str = ""

    def store(self, frame: Frame) -> None:
        """Store a frame that has arrived; what is for a finished exchange comes from a member that was late for it."""
        self.set_entered(frame.sequence, self.last_call if frame.kind in _WITHOUT_CALL else frame.call)
        if frame.kind is FrameKind.LEFT:
            self.left = self.left or frame.call
        elif frame.sequence >= self.first_sequence:
            if frame.kind is FrameKind.FAILED and len(self.frames) >= _MAX_TRACEBACKS:
                frame.body = without_traceback(frame.body, frame.call)
            self._of(frame.kind)[frame.sequence] = frame

    def set_entered(self, sequence: int, call: str) -> None:
        """Record that the member has entered an exchange."""
        if sequence >= self.last_sequence:
            self.last_sequence, self.last_call = sequence, call

    def discard_before(self, sequence: int) -> None:
        """Discard what was sent for exchanges before `sequence`, also what has not arrived yet."""
        self.first_sequence = sequence
        for stored in (self.frames, self.arrivals, self.bundles, self.verdicts, self.errors):
            for old in [number for number in stored if number < sequence]:
                del stored[old]

    def _of(self, kind: FrameKind) -> dict[int, Frame]:
        if kind is FrameKind.ARRIVED:
            return self.arrivals
        if kind is FrameKind.BUNDLE:
            return self.bundles
        if kind is FrameKind.VERDICT:
            return self.verdicts
        return self.errors if kind is FrameKind.ENDED else self.frames


class Tree:
    """The tree of the members of a group, by group rank, as one of them sees it.

    Attributes:
        own: The member.
        parents: The parent of each member, a lower number; that of the root, the first member, is the root.
        parent: The parent of this member.
        children: The children of this member.
        below: The members of the subtree of this member, and of the subtree of each child, with its own root.
    """

    def __init__(self, own: int, hosts: Sequence[str]) -> None:
        """Make the tree.

        Args:
            own: The group rank of this process.
            hosts: The id of the host of each member.
        """
        if len(hosts) <= MAX_STAR_SIZE:
            hosts = [str(member) for member in range(len(hosts))]
        leaders: dict[str, int] = {}
        for member, host in enumerate(hosts):
            leaders.setdefault(host, member)
        self.parents = [leaders[host] for host in hosts]
        for index, leader in enumerate(in_order := list(leaders.values())):
            self.parents[leader] = in_order[max(index - 1, 0) // FAN_OUT]
        self.own = own
        self.parent = self.parents[own]
        self.children = [member for member, parent in enumerate(self.parents) if parent == own != member]
        self.below: dict[int, list[int]] = {child: [] for child in self.children}
        for member in range(len(hosts)):
            if (source := self.source(member)) in self.below:
                self.below[source].append(member)
        self.below[own] = sorted([own, *(member for members in self.below.values() for member in members)])

    @property
    def is_root(self) -> bool:
        """This member is the root."""
        return self.parent == self.own

    def source(self, member: int) -> int:
        """Return the member from which this one receives the frame of another one: a child, or its parent."""
        while self.parents[member] > self.own:
            member = self.parents[member]
        return member if self.parents[member] == self.own != member else self.parent


class Exchange:
    """One exchange of a member.

    Attributes:
        frame: The frame of this member.
    """

    def __init__(
        self,
        frame: Frame,
        *,
        ranks: Sequence[int],
        tree: Tree,
        inboxes: Mapping[int, Inbox],
        combine: Combine | None,
        timeout: float,
    ) -> None:
        """Begin an exchange.

        Args:
            frame: The frame of this member: its call, or the details of it.
            ranks: The global ranks of the members.
            tree: The tree of the members.
            inboxes: What has arrived from each other member.
            combine: Computes the result from the bodies of all members.
            timeout: Seconds that this member waits for the others.
        """
        self.frame = frame
        self._outgoing: list[tuple[Collection[int], Frame]] = []
        self._ranks = ranks
        self._tree = tree
        self._inboxes = inboxes
        self._combine = combine
        self._timeout = timeout
        self._announce_after = min(_ANNOUNCE_SECONDS, timeout / 2)
        self._verdict: Verdict | None = None
        self._informed: set[int] = set()  # the members that have this one's frame from itself, or its announcement
        self._has_sent_up = False
        self._error: CollectiveError | None = None  # by which a member has ended the exchange
        self._error_since = self._lost_since = -1.0  # in seconds that this member had waited

    def frames(self) -> dict[int, Frame]:
        """Return the frames that have arrived, and that of this member, by group rank."""
        sequence = self.frame.sequence
        arrived = {member: inbox.frames.get(sequence) for member, inbox in self._inboxes.items()}
        return {self._tree.own: self.frame} | {member: frame for member, frame in arrived.items() if frame is not None}

    # All members must come to the same verdict, although each may die, fail or time out at any moment.
    # - Calls agree, or differ, by the verdict of the root alone. It has all frames then, so no member has failed.
    # - A member that has failed, or is in a deadlock, sends no call. So the root cannot find that the calls agree, and
    #   every member that sees the failure raises it at once, without waiting for the root, which may not have come.
    # - A member that waits no longer, since its timeout has expired or another one is lost, sends its error to all.
    #   Meanwhile the root may have found agreement. So nobody raises this error at once but the root; the others wait a
    #   moment for a verdict. Only one that takes longer than that to arrive can come too late.
    # - A member whose parent is lost hears nothing from the root. It ends the exchange, as for any lost member.
    def step(self, waited: float) -> Verdict | None:
        """Handle what has arrived, and return the verdict; None while this member waits.

        Args:
            waited: The seconds that this member has waited.
        """
        if self._verdict is not None:
            return self._verdict
        for inbox in self._inboxes.values():
            bundle = inbox.bundles.pop(self.frame.sequence, None)
            if bundle is not None:
                self._unbundle(bundle)
        frames = self.frames()
        verdict = self._reported(frames)
        if verdict is None:
            verdict = self._decided(frames, waited) if self._tree.is_root else self._received(waited)
            if verdict is not None:
                self._send_down(verdict, frames)
        if verdict is None and not self._tree.is_root:
            self._send_up(frames)
        if verdict is None and waited > self._announce_after:
            self._send(self._inboxes, replace(self.frame, kind=FrameKind.ARRIVED, body=b""))
        self._verdict = verdict
        return verdict

    @property
    def is_complete(self) -> bool:
        """All frames have arrived at the root, which is this member."""
        sequence = self.frame.sequence
        return self._tree.is_root and all(sequence in inbox.frames for inbox in self._inboxes.values())

    def take_outgoing(self) -> list[tuple[Collection[int], Frame]]:
        """Return what is to be sent now, in this order: the receivers, and the frame."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def longest_wait(self, waited: float) -> float:
        """Return after how many seconds this member has to look again if nothing arrives."""
        if self._error is not None or self._lost_since >= 0:
            return LOSS_SECONDS
        return max(self._announce_after, waited)

    @property
    def is_ended(self) -> bool:
        """A member has ended the exchange with an error."""
        return self._error is not None

    def end(self, error: CollectiveError, waited: float) -> None:
        """End the exchange with an error, for all members."""
        if self._error is None:
            self._error, self._error_since = error, waited
            self._outgoing.append((self._inboxes, self._made(FrameKind.ENDED, pickle.dumps(error))))

    def late(self) -> list[int]:
        """Return the members that are not known to have entered the exchange."""
        return [member for member in self._inboxes if not self._has_entered(member)]

    def surely_late(self, waited: float) -> list[int]:
        """Return the late members that have not finished the exchange either."""
        late = self.late()
        # Another member hears of the verdict before this one, and was late for nobody. The root comes before all.
        if self._tree.is_root or waited > _ANNOUNCED_SECONDS:
            return late
        return [member for member in late if member in (0, self._tree.parent)]

    def blocking(self) -> list[int]:
        """Return the members that are in the exchange, and have not sent on what this one waits for."""
        if not self._tree.is_root:
            return [self._tree.parent]
        return sorted({self._tree.source(member) for member in self._inboxes.keys() - self.frames().keys()})

    def lost(self, waited: float, lost_reason: Callable[[int], str]) -> list[int]:
        """Return the members that are gone, and because of which the exchange cannot end.

        Args:
            waited: The seconds that this member has waited.
            lost_reason: Returns why a member is gone; "" if it is not.
        """
        lost = [member for member in self._inboxes if lost_reason(member) and self._needs(member)]
        if not lost:
            self._lost_since = -1.0
            return []
        if self._lost_since < 0:
            self._lost_since = waited
        return lost if waited - self._lost_since > LOSS_SECONDS or waited > self._timeout else []

    def _has_entered(self, member: int) -> bool:
        """Return whether another member is known to have entered the exchange."""
        return self._inboxes[member].last_sequence >= self.frame.sequence

    def _needs(self, member: int) -> bool:
        """Return whether the exchange cannot end without another member, which is gone."""
        tree = self._tree
        if member == tree.parent:
            return True
        if member in tree.children:
            return self.frame.sequence not in self._inboxes[member].frames
        # Its parent has its frame, or finds that it will not come; unless that is not in the exchange itself.
        return not self._has_entered(member) and not self._has_entered(tree.parents[member])

    def _reported(self, frames: Mapping[int, Frame]) -> Verdict | None:
        """Return the verdict if a member has failed, or is in a deadlock."""
        kinds = {frame.kind for frame in frames.values()}
        if FrameKind.FAILED in kinds:  # before a lost member: it may have left because of its failure
            return conclude(self._ranks, frames, None)
        if FrameKind.WAITING_IN_OTHER_GROUP in kinds and not self.late():  # reported with the calls of all members
            sequence = self.frame.sequence
            arrived = {member: inbox.arrivals.get(sequence) for member, inbox in self._inboxes.items()}
            known = {member: frame for member, frame in arrived.items() if frame is not None} | dict(frames)
            return conclude(self._ranks, known, None)
        return None

    def _decided(self, frames: Mapping[int, Frame], waited: float) -> Verdict | None:
        """Return the verdict of the root: of this member."""
        error = self._ended(waited)
        if error is not None:
            return Verdict(Outcome.ERROR, error=error)
        return conclude(self._ranks, frames, self._combine) if len(frames) == len(self._ranks) else None

    def _received(self, waited: float) -> Verdict | None:
        """Return the verdict of the root: from the parent of this member; or an error after waiting for it in vain."""
        verdict = self._inboxes[self._tree.parent].verdicts.pop(self.frame.sequence, None)
        if verdict is not None:
            return Verdict.decode(verdict.body)
        error = self._ended(waited)
        if error is None or waited - self._error_since < LOSS_SECONDS:
            return None
        return Verdict(Outcome.ERROR, error=error)

    def _ended(self, waited: float) -> CollectiveError | None:
        """Return the first error by which a member has ended the exchange; None if none has."""
        for inbox in self._inboxes.values() if self._error is None else ():
            ended = inbox.errors.get(self.frame.sequence)
            if ended is not None:
                self._error, self._error_since = read_report(ended.body), waited
                break
        return self._error

    def _unbundle(self, bundle: Frame) -> None:
        for member, frame in decode_bundle(bundle.body):
            self._inboxes[member].store(frame)

    def _send_up(self, frames: Mapping[int, Frame]) -> None:
        """Send the frames of this member and of those below it to its parent, once all are here."""
        if self._has_sent_up:
            return
        below = self._tree.below[self._tree.own]
        if all(member in frames for member in below):
            self._has_sent_up = True
            if len(below) == 1:
                self._send([self._tree.parent], self.frame)
            else:
                self._informed.add(self._tree.parent)
                self._send_bundle(self._tree.parent, [(member, frames[member]) for member in below])

    def _send_down(self, verdict: Verdict, frames: Mapping[int, Frame]) -> None:
        """Send the verdict to the children of this member, with the frames of others if members below them read any."""
        published = self._made(FrameKind.VERDICT, verdict.encode())
        for child in self._tree.children:
            below = self._tree.below[child]
            if verdict.outcome is Outcome.AGREED and any(frames[member].reads for member in below):
                others = sorted(frames.keys() - set(below))
                self._send_bundle(
                    child, [*((member, frames[member]) for member in others), (self._tree.own, published)]
                )
            else:
                self._outgoing.append(([child], published))

    def _send_bundle(self, member: int, frames: Iterable[tuple[int, Frame]]) -> None:
        self._outgoing.append(([member], self._made(FrameKind.BUNDLE, encode_bundle(frames))))

    def _made(self, kind: FrameKind, body: bytes) -> Frame:
        """Return a frame of this exchange, beside that of this member's call."""
        call = "" if kind in _WITHOUT_CALL else self.frame.call
        return Frame(kind, call, body=body, group=self.frame.group, sequence=self.frame.sequence)

    def _send(self, members: Collection[int], frame: Frame) -> None:
        """Send this member's frame, or its announcement, to those members that have not got it."""
        missing = [member for member in members if member not in self._informed]
        if missing:
            self._outgoing.append((missing, frame))
            self._informed.update(missing)
