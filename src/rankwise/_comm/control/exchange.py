"""An exchange between units, as the leader of one of them sees it: what has arrived, what to send, and the verdict.

No I/O. A unit is the members of a group that agree through the page of their host, or a member that has no page. Its
first member leads it, and the leaders form a `Tree`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rankwise._comm.control.calls import Calls, conclude_calls, decode_calls, encode_calls, merged
from rankwise._comm.control.protocol import Frame, FrameKind, read_report
from rankwise._comm.control.tree import Tree
from rankwise._comm.control.verdict import Combine, Outcome, Verdict
from rankwise.errors import RankwiseError

# How long a leader that would end an exchange waits for the verdict of the root, which may have been found just before.
GRACE_SECONDS: Final = 1.0


@dataclass(slots=True)
class Inbox:
    """What another leader has sent for the exchanges of a group, by sequence number, until this one comes to them.

    Attributes:
        calls: The calls of the units below it; from a parent those of all, before the verdict on them.
        verdicts: The verdicts.
        ends: The errors by which members would end an exchange.
        first_sequence: The first exchange that this leader has not finished.
    """

    calls: dict[int, Frame] = field(default_factory=dict)
    verdicts: dict[int, Frame] = field(default_factory=dict)
    ends: dict[int, Frame] = field(default_factory=dict)
    first_sequence: int = 0

    def store(self, frame: Frame) -> None:
        """Store a frame; one for a finished exchange comes from a leader that was late for it."""
        if frame.sequence >= self.first_sequence:
            kinds = {FrameKind.CALLS: self.calls, FrameKind.VERDICT: self.verdicts, FrameKind.ENDED: self.ends}
            kinds[frame.kind].setdefault(frame.sequence, frame)

    def discard_before(self, sequence: int) -> None:
        """Discard what is for exchanges before `sequence`, also what has not arrived yet."""
        self.first_sequence = sequence
        for stored in (self.calls, self.verdicts, self.ends):
            for old in [number for number in stored if number < sequence]:
                del stored[old]


class Exchange:
    """One exchange of a leader.

    Attributes:
        calls: The calls that have come: of this unit and those below it; those of all once they are known.
        verdict: The verdict; None while there is none.
        error: The error by which a member would end the exchange; None if none would.
    """

    def __init__(
        self,
        group: int,
        sequence: int,
        *,
        ranks: Sequence[int],
        unit: int,
        tree: Tree,
        inboxes: Mapping[int, Inbox],
        combine: Combine | None,
    ) -> None:
        """Begin an exchange.

        Args:
            group: The id of the group.
            sequence: The number of the exchange.
            ranks: The global ranks of the members.
            unit: The number of this unit.
            tree: The tree of the units.
            inboxes: What has arrived from the leaders of its parent and its children, by unit.
            combine: Computes the result from the bodies of all members.
        """
        self.calls: list[Calls] = []
        self.verdict: Verdict | None = None
        self.error: RankwiseError | None = None
        self._group, self._sequence = group, sequence
        self._ranks = ranks
        self._inboxes = inboxes
        self._combine = combine
        self._parent = tree.parent(unit)
        self._awaited = {unit, *tree.children(unit)}  # units whose calls, with those below them, have not come
        self._readers: list[int] = []  # the children below which a member reads the bodies of others
        self._unit = unit
        self._outgoing: list[tuple[int, Frame]] = []
        self._error_since = 0.0

    # All members must come to the same verdict, although each may die, fail or wait no longer at any moment, and
    # although a leader that has not come to the exchange passes nothing on.
    # - That calls agree, or differ, is found by the root alone, when it has the calls of all. So no member has failed.
    # - A member that fails, or is in a deadlock, sends no call. The verdict on that is final, whoever finds it: it goes
    #   to all neighbours, and from them to theirs. A board in the store has it for those behind a leader that is late.
    # - A member that waits no longer, since its timeout has expired or another one is lost, would end the exchange. The
    #   root may have found agreement meanwhile. So the end goes up the tree, behind the calls: the root, which reads
    #   all that has arrived before it concludes, ends the exchange for all. A leader that has sent calls waits for
    #   that verdict, for a moment; only a verdict that is on its way for longer comes too late. A leader that has not
    #   sent the calls of its unit knows that there is none, and ends the exchange at once.
    def step(self, waited: float) -> Verdict | None:
        """Handle what has arrived, and return the verdict; None while this leader waits.

        Args:
            waited: The seconds that this leader has waited.
        """
        if self.verdict is None:
            self._receive(waited)
        if self.verdict is None and self.error is not None:
            if self._parent is None or not self.is_sent or waited - self._error_since > GRACE_SECONDS:
                self._decide(Verdict(Outcome.ERROR, error=self.error), self._inboxes.keys() - {self._parent})
        elif self.verdict is None and not self._awaited and not self.is_sent:
            self.calls = merged(self.calls)
            if self._parent is None:
                self._conclude()
            else:
                self._send(self._parent, FrameKind.CALLS, encode_calls(self.calls))
                self._awaited = {self._parent}
        return self.verdict

    @property
    def is_sent(self) -> bool:
        """The calls of this unit, and of those below it, were sent to its parent."""
        return self._parent is not None and self._parent in self._awaited

    @property
    def is_root(self) -> bool:
        """This leader is the root."""
        return self._parent is None

    @property
    def awaits_own(self) -> bool:
        """The calls of this unit have not come."""
        return self._unit in self._awaited

    def blocking(self) -> list[int]:
        """Return the neighbours for whose calls, or verdict, this leader waits."""
        awaited = self._awaited if self._parent is None else self._awaited | {self._parent}
        return sorted(awaited - {self._unit})

    def add_own(self, calls: Sequence[Calls]) -> None:
        """Add the calls of all members of this unit."""
        self.calls += calls
        self._awaited.discard(self._unit)

    def end(self, error: RankwiseError, waited: float) -> None:
        """End the exchange because a member waits no longer, unless the root has found a verdict."""
        if self.error is None and self.verdict is None:
            self.error, self._error_since = error, waited
            if self._parent is not None:
                self._send(self._parent, FrameKind.ENDED, pickle.dumps(error))

    def fail(self, verdict: Verdict) -> None:
        """End the exchange with a final error."""
        if self.verdict is None:
            self._decide(verdict, self._inboxes.keys())

    def take_outgoing(self) -> list[tuple[int, Frame]]:
        """Return what is to be sent now, in this order: the units, and the frames for their leaders."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _receive(self, waited: float) -> None:
        """Handle what has arrived from the neighbours."""
        for unit, inbox in self._inboxes.items():
            verdict = inbox.verdicts.get(self._sequence)
            if verdict is not None:
                calls = inbox.calls.get(self._sequence) if unit == self._parent else None
                if calls is not None:
                    self.calls = decode_calls(calls.body)
                found = Verdict.decode(verdict.body)
                others = self._inboxes.keys() - ({unit} if found.outcome is Outcome.ERROR else {unit, self._parent})
                self._decide(found, others, None if calls is None else calls.body)
                return
            end = inbox.ends.get(self._sequence)
            if end is not None:
                self.end(read_report(end.body), waited)
            if unit in self._awaited and unit != self._parent and self._sequence in inbox.calls:
                self._awaited.remove(unit)
                below = decode_calls(inbox.calls[self._sequence].body)
                self.calls += below
                if any(calls.frame.reads for calls in below):
                    self._readers.append(unit)

    def _conclude(self) -> None:
        """Find the verdict, as the root."""
        verdict = conclude_calls(self._ranks, self.calls, self._combine)
        is_read = verdict.outcome is Outcome.AGREED and self._readers
        self._decide(verdict, self._inboxes, encode_calls(self.calls) if is_read else None)

    def _decide(self, verdict: Verdict, units: Collection[int], calls: bytes | None = None) -> None:
        """Set the verdict, and send it to the leaders of units; before it the calls to those that read bodies."""
        self.verdict = verdict
        body = verdict.encode()
        for unit in units:
            if calls is not None and unit in self._readers:
                self._send(unit, FrameKind.CALLS, calls)
            self._send(unit, FrameKind.VERDICT, body)

    def _send(self, unit: int, kind: FrameKind, body: bytes) -> None:
        self._outgoing.append((unit, Frame(kind, "", body=body, group=self._group, sequence=self._sequence)))
