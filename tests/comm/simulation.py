"""A simulated network: the members of one exchange, without threads, sockets or a clock.

Each member has an `Exchange`, which does no I/O; here its frames take a random time, and arrive in the order in which
they were sent to the same member. A member that dies has sent what it has sent, of which the last part may be lost.
"""

from __future__ import annotations

import heapq
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from rankwise._comm.control.exchange import Exchange, Inbox, Tree
from rankwise._comm.control.protocol import Description, Details, Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict
from rankwise.errors import CollectiveError, CollectiveTimeoutError, RemoteRankError

NEVER = 1e9
KILLED = "is gone"
LEFT = "left the group"
CALL, OTHER_CALL = Description("all_reduce", site="train.py:88"), Description("barrier", site="train.py:99")


@dataclass(kw_only=True)
class Plan:
    """What a member does.

    Attributes:
        enters: When it comes to the exchange; never at `NEVER`.
        dies: When it is killed.
        fails: It raises instead of entering.
        differs: It makes another call.
        timeout: Seconds that it waits.
        leaves: It leaves the group after the exchange.
    """

    enters: float = 0.0
    dies: float = NEVER
    fails: bool = False
    differs: bool = False
    timeout: float = 100.0
    leaves: bool = False


@dataclass
class Member:
    """A simulated member.

    Attributes:
        plan: What it does.
        tree: The tree as it sees it.
        inboxes: What has arrived from each other member.
        lost: The members whose connections have closed.
        exchange: Its exchange, once it has entered it.
        verdicts: The verdicts of its exchanges: of the second one, if calls differ.
        ended: When it had its last verdict.
    """

    plan: Plan
    tree: Tree
    inboxes: dict[int, Inbox]
    lost: dict[int, str] = field(default_factory=dict)
    exchange: Exchange | None = None
    start: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    ended: float = 0.0

    @property
    def verdict(self) -> Verdict | None:
        """Its verdict; None if it has none."""
        return self.verdicts[-1] if self.verdicts and self.verdicts[-1].outcome is not Outcome.DIFFERENT else None

    def lost_reason(self, member: int) -> str:
        return self.inboxes[member].left or self.lost.get(member, "")


class Simulation:
    """One exchange of a group; with a second one for the details if calls differ."""

    def __init__(self, plans: Sequence[Plan], hosts: Sequence[str], *, seed: int, longest_delay: float) -> None:
        """Begin at time 0.

        Args:
            plans: What each member does.
            hosts: The host of each member.
            seed: Of the delays.
            longest_delay: The longest time that a frame takes, in seconds.
        """
        self.size = len(plans)
        self.num_sent = 0
        self._random = random.Random(seed)  # noqa: S311 - to be repeated
        self._longest_delay = longest_delay
        self._events: list[tuple[float, int, str, int, int, Frame | None]] = []
        self._numbers = count()
        self._last_arrival: dict[tuple[int, int], float] = {}
        self.now = 0.0
        everyone = range(self.size)
        self.members = [
            Member(plan, Tree(own, hosts), {other: Inbox() for other in everyone if other != own})
            for own, plan in enumerate(plans)
        ]
        for own, plan in enumerate(plans):
            self._at(plan.enters, "enter", own)
            self._at(plan.dies, "die", own)

    def run(self, until: float) -> None:
        """Run until nothing happens any more, or until a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what, own, source, frame = heapq.heappop(self._events)
            member = self.members[own]
            if what == "die":
                self._die(own)
            elif self.now >= member.plan.dies:
                continue
            elif what == "enter":
                self._enter(own)
            elif what == "arrive" and frame is not None:
                member.inboxes[source].store(frame)
                self._step(own)
            elif what == "lose":
                member.lost[source] = KILLED
                self._step(own)
            else:
                self._step(own)

    def _at(self, time: float, what: str, own: int, source: int = -1, frame: Frame | None = None) -> None:
        if time < NEVER:
            heapq.heappush(self._events, (time, next(self._numbers), what, own, source, frame))

    def _post(self, own: int, receivers: Sequence[int], frame: Frame) -> None:
        for other in receivers:
            self.num_sent += 1
            arrives = self.now + self._random.uniform(0, self._longest_delay)
            arrives = max(arrives, self._last_arrival.get((own, other), 0.0))
            self._last_arrival[own, other] = arrives
            self._at(arrives, "arrive", other, own, replace(frame))  # each receiver has a frame of its own

    def _die(self, own: int) -> None:
        """Close the connections: what was sent arrives before the end, or, to some members, is lost."""
        for other in self.members[own].inboxes:
            if self._random.random() < 0.3:
                self._events = [event for event in self._events if event[2:5] != ("arrive", other, own)]
                self._last_arrival.pop((own, other), None)
        heapq.heapify(self._events)
        for other in self.members[own].inboxes:
            after = max(self.now, self._last_arrival.get((own, other), 0.0))
            self._at(after + self._random.uniform(0, self._longest_delay), "lose", other, own)

    def _enter(self, own: int) -> None:
        member = self.members[own]
        others = list(member.inboxes)
        if member.plan.fails:
            error = RemoteRankError(rank=own, host="node", raised="ValueError: bad", traceback="")
            self._post(own, others, self._numbered(CALL.frame(FrameKind.FAILED, pickle.dumps(error)), 1))
            return
        call = OTHER_CALL if member.plan.differs else CALL
        self._begin(own, call.frame(body=bytes([own % 256])), 1)

    def _begin(self, own: int, frame: Frame, sequence: int) -> None:
        member = self.members[own]
        frame = self._numbered(frame, sequence)
        frame.reads = sequence == 1
        for inbox in member.inboxes.values():
            inbox.discard_before(sequence)
        member.start = self.now
        member.exchange = Exchange(
            frame,
            ranks=range(self.size),
            tree=member.tree,
            inboxes=member.inboxes,
            combine=b"".join,
            timeout=member.plan.timeout,
        )
        self._at(self.now + member.plan.timeout + 0.001, "look", own)
        self._step(own)

    def _step(self, own: int) -> None:
        """Do what the channel of a member does after an event."""
        member = self.members[own]
        exchange, waited = member.exchange, self.now - member.start
        if exchange is None:
            return
        verdict = exchange.step(waited)
        if verdict is None:
            lost = exchange.lost(waited, member.lost_reason)
            if lost:
                names = "; ".join(f"rank {other} {member.lost_reason(other)}" for other in lost)
                exchange.end(CollectiveError(names), waited)
            elif waited > member.plan.timeout and not exchange.is_ended:
                late = exchange.late() or exchange.blocking()
                exchange.end(CollectiveTimeoutError(f"missing: {late}"), waited)
            self._at(self.now + max(exchange.longest_wait(waited), 0.01), "look", own)
        for receivers, frame in exchange.take_outgoing():
            self._post(own, list(receivers), frame)
        if verdict is None:
            return
        member.verdicts.append(verdict)
        member.ended = self.now
        member.exchange = None
        if verdict.outcome is Outcome.AGREED:
            verdict.bodies = {other: frame.body for other, frame in exchange.frames().items()}
        if verdict.outcome is Outcome.DIFFERENT:
            details = Details(exchange.frame.call, "train.py", {"": exchange.frame.call})
            self._begin(own, CALL.frame(FrameKind.DETAILS, pickle.dumps(details)), 2)
        elif member.plan.leaves:
            self._post(own, list(member.inboxes), self._numbered(Frame(FrameKind.LEFT, LEFT), len(member.verdicts)))

    def _numbered(self, frame: Frame, sequence: int) -> Frame:
        frame.sequence = sequence
        return frame
