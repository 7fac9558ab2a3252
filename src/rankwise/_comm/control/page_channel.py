"""A channel through the page of the host: members write their frames into memory that all of them can read.

The first member leads. It waits for the frames of the others, of which the last one wakes it, computes the verdict,
and wakes them up: one wake-up for each member, whatever the collective. The others wait for the verdict. Where there is
no leader yet, each member notices by itself that another one is gone, or that a timeout has expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from rankwise._comm.control.channel import Channel, Part
from rankwise._comm.control.flow import LOSS_SECONDS
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import CLOSED
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.page.layout import ARRIVALS, PIPES_START, RING_ENTRIES, pipe_bytes
from rankwise._comm.control.page.meeting import PageMeeting
from rankwise._comm.control.page.pipes import Pipes
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict, combined, conclude
from rankwise._comm.shared_memory import SharedRange
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise.errors import CollectiveError, CollectiveTimeoutError, RankwiseError

_LEADER: Final = 0
_LEADER_CHECK_SECONDS: Final = 0.05
# The number of exchanges that a member may be ahead of others before it waits for them. Only one that fails in each of
# them gets so far.
_MAX_EXCHANGES_AHEAD: Final = 1000
_AHEAD_SECONDS: Final = 0.005
# Before the text of an error by which a member has ended an exchange.
_TIMEOUT: Final = "t"
_LOSS: Final = "l"


class PageChannel(Channel):
    """The exchanges of one group whose members are all on this host.

    Each member has a slot in the window of the group: its group rank, unless other members are on other hosts.

    Attributes:
        page: The page of the host.
    """

    # How long a member whose timeout has expired waits for the verdict of a leader that is there: the leader may have
    # received all frames just before.
    _leader_seconds = 1.0

    def __init__(self, group: int, ranks: Sequence[int], links: Links, page: HostPage) -> None:
        """Open the channel."""
        here = set(page.ranks)
        members = [member for member, rank in enumerate(ranks) if rank in here]
        self._window = page.attach(group, len(members))  # before the links know of the group: it may raise
        super().__init__(group, ranks, links)
        self.page = page
        self._spin_seconds = page.spin_seconds
        self._members = members
        self._num_slots = len(members)
        self._slot = members.index(self.own)
        self._own_arrivals = self._window.arrivals[self._slot]
        self._indices = [page.ranks.index(ranks[member]) for member in members]
        # The last exchange whose frames were those of all members: none of them reads the frames before any more.
        self._last_complete = 0
        self._has_room = True
        self._meeting: PageMeeting | None = None
        self._pipes: Pipes | None = None

    @property
    def same_host(self) -> bool:
        return True

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self.require_open(frame.call)
        self._enter(frame, time.monotonic())
        self._report(frame)
        self._window.fence()
        self._window.finished[self._slot] = self.sequence
        start = time.monotonic()
        while timeout is not None and (slow := self._behind(self.sequence - _MAX_EXCHANGES_AHEAD)):
            if elapsed_since(start) > timeout:
                names = ", ".join(map(self._name_in, slow))
                raise CollectiveTimeoutError(f"{frame.call}: {names} read nothing for {timeout:g} s")
            self.require_open(frame.call)
            time.sleep(_AHEAD_SECONDS)
            self._refresh()

    def map_staging(self, nbytes: int) -> SharedRange:
        """Map the memory through which the tensors of the group pass; see `HostPage`."""
        return self.page.map_staging(self._window, nbytes)

    def transfer(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], *, timeout: float
    ) -> Callable[[], None]:
        if not self.page.shares_tensors:
            return super().transfer(outgoing, incoming, timeout=timeout)
        self.require_open(self.call)
        if self._pipes is None:
            self._pipes = Pipes(
                self.page.map_staging(self._window, self._num_slots**2 * pipe_bytes(self._num_slots), PIPES_START),
                self.ranks,
                self.own,
                loop=self._links.loop,
                fence=self._window.fence,
                wake=self._wake_sleeping,
                sleep=self._sleep,
            )
        begin = self._pipes.reserve(outgoing, incoming)
        return lambda: self._run(begin, timeout)

    @contextmanager
    def meetings(self, timeout: float) -> Iterator[Callable[[], None]]:
        """Hold the lock in a block, which gives a function that waits until all members have called it as often.

        Raises:
            CollectiveError: A member is gone, or this member has left the group in another thread.
            CollectiveTimeoutError: A member has not come for `timeout` seconds.
        """
        with self.held():
            self.require_open(self.call)
            meeting = self._meeting = self._meeting or PageMeeting(self._window, self._slot, self.page.spin_seconds)
            yield partial(meeting.meet, partial(self._check_meeting, meeting, timeout))

    def pending_calls(self, ranks: Container[int]) -> list[Frame]:
        sequence = self.sequence + 1
        arrived = [slot for slot, member in enumerate(self._members) if self.ranks[member] in ranks]
        arrived = [slot for slot in arrived if self._window.has_arrived(slot, sequence)]
        frames = [self._window.read(slot, sequence) for slot in arrived if not self._lost_reason_in(slot)]
        return [frame for frame in frames if frame.kind is FrameKind.CALL]

    def unit_frames(self) -> dict[int, Frame]:
        slots = range(self._num_slots)
        arrived = [slot for slot in slots if self._window.has_arrived(slot, self.sequence)]
        self._window.fence()
        return {self._members[slot]: self._window.read(slot, self.sequence) for slot in arrived}

    def lost_reason(self, member: int) -> str:
        return self._lost_reason_in(self._members.index(member))

    def _arrivals_at(self, sequence: int) -> list[float]:
        # A member may have come to the next exchange, and written over its arrival at the oldest one.
        if sequence < self.sequence + 2 - ARRIVALS:
            return []
        return [arrivals[sequence % ARRIVALS] for arrivals in self._window.arrivals]

    def _leave(self, reason: str) -> None:
        self._window.set_left(self._slot, reason)
        self._wake_others()

    def _free(self) -> None:
        self._pipes = None
        self.page.detach(self._window, self._num_slots)

    # How an exchange works, and what makes it hard.
    #
    # A member writes its frame, and then its sequence number (`_enter`). The first member leads: when all numbers are
    # there it computes the verdict and writes it, and the others, which wait for that number alone, read it. So a
    # collective costs each member one sleep at most, and wakes each of them once.
    #
    # All members must come to the same verdict, although each may die, fail or time out at any moment:
    # - The leader looks at the frames first and at problems second, with a fence between: a member that has failed sets
    #   the problem before its frame counts as arrived. After it has computed the verdict, which may take long, it looks
    #   at problems once more: a member whose timeout has expired meanwhile will not wait for this verdict.
    # - Such a member first writes that it has timed out, and only then waits a moment longer for a leader that is there
    #   (`_end_for_all`). Either the leader sees the timeout, and publishes it, or it had published before.
    # - A leader that is gone publishes nothing. Each member then finds by itself who is missing (`_problem`), from the
    #   same memory, which nobody changes any more: so all find the same. It looks for a verdict again first, of a
    #   leader that published and left between two looks.
    #
    # The frames of an exchange stay readable until all members have come to the next one but one: `finished` tells a
    # writer when it may write over them. While others have not come so far, it writes to the ring instead.
    def _exchange(self, part: Part) -> Verdict:
        self._enter(part.frame, part.start)
        try:
            verdict = self._lead(part) if self._slot == _LEADER else self._follow(part)
            if verdict.outcome is not Outcome.ERROR:
                self._last_complete = self.sequence
            if verdict.outcome is Outcome.AGREED and part.read:
                verdict.bodies = self._bodies(part.read)
            return verdict
        finally:
            self._window.fence()
            self._window.finished[self._slot] = self.sequence

    def _enter(self, frame: Frame, now: float) -> None:
        """Write this member's frame of the next exchange, and wake the leader."""
        if self._last_complete != self.sequence and self._behind(self.sequence + 2 - RING_ENTRIES):
            self.close(f"ended {RING_ENTRIES} collectives that other ranks have not come to")
            self.require_open(frame.call)
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence = self.group, self.sequence
        self._own_arrivals[self.sequence % ARRIVALS] = now
        # No member reads the frames of the exchange any more whose room those of this one need.
        self._has_room = self._last_complete == self.sequence - 1 or not self._behind(self.sequence - 2)
        self._window.write(self._slot, frame, has_room=self._has_room)
        if frame.kind is not FrameKind.CALL and frame.kind is not FrameKind.DETAILS:
            self._wake_others()  # those that wait without a leader, too
        elif self._slot != _LEADER:
            self._window.fence()
            # The last member that comes wakes the leader: before, it has nothing to do.
            if self._window.num_arrived(self.sequence) >= self._num_slots:
                self._wake_sleeping([_LEADER])

    def _bodies(self, members: Collection[int]) -> dict[int, bytes]:
        """Return the bodies of members, after the calls of all have agreed."""
        return {member: self._window.body(member, self.sequence) for member in members}

    def _report(self, frame: Frame) -> None:
        """Let the others know of a frame in place of this member's call, whose exchange it does not wait for."""
        if self._slot == _LEADER:
            self._publish(conclude(self.ranks, self.unit_frames() | {self.own: frame}, None))

    def _behind(self, sequence: int) -> list[int]:
        """Return the slots of members that have not finished an exchange yet, and will."""
        finished = self._window.finished[: self._num_slots].tolist()
        behind = [slot for slot, last in enumerate(finished) if last < sequence]
        return [slot for slot in behind if slot != self._slot and not self._lost_reason_in(slot)]

    def _lost_reason_in(self, slot: int) -> str:
        """Return why the member of a slot takes part in no further exchange, as far as is known; "" if it does."""
        left = "" if slot == self._slot else self._window.left(slot)
        return left or (CLOSED if self._indices[slot] in self.page.dead else "")

    def _name_in(self, slot: int) -> str:
        return self._links.name(self.ranks[self._members[slot]])

    def _lead(self, part: Part) -> Verdict:
        """Wait for the frames of all members, and publish the verdict."""
        size = self._num_slots
        while True:
            seen = self._links.loop.num_events
            num_arrived = self._window.num_arrived(self.sequence)
            self._window.fence()
            verdict = self._problem() if self.page.dead or self._window.has_problem(self.sequence) else None
            if verdict is None and num_arrived == size:
                bodies = self._window.bodies_of_calls(self.sequence, part.frame.digest)
                if bodies is None:
                    verdict = conclude(self.ranks, self.unit_frames(), part.combine)
                else:
                    verdict = combined(bodies, part.combine)
                if self._window.has_problem(self.sequence):
                    verdict = self._problem() or verdict  # a timeout has expired meanwhile
            if verdict is None and part.is_late:
                verdict = Verdict(Outcome.ERROR, error=self.timeout_error(part, self._missing()))
            if verdict is not None:
                self._publish(verdict)
                return verdict
            self._wait(part, seen, partial(self._window.has_arrivals, self.sequence, num_arrived))

    def _follow(self, part: Part) -> Verdict:
        """Wait for the verdict."""
        while True:
            seen = self._links.loop.num_events
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            if self.page.dead or self._window.has_problem(self.sequence):
                problem = self._problem()
                if problem is not None and not self._is_led():
                    # Of a leader that came, published, and left since the first look.
                    return self._verdict() or self._without_leader(problem)
            if self._is_late(part):
                return self._give_up(part)
            if not self._wait(part, seen, partial(self._window.has_arrived, self._window.verdict_slot, self.sequence)):
                verdict = self._verdict_of_others(part)
                if verdict is not None:
                    return verdict

    def _late(self) -> Sequence[int]:
        """Return the members for which this one has waited in vain."""
        return self._missing() or self._members[:1]

    def _without_leader(self, problem: Verdict) -> Verdict:
        """End an exchange that this member has found to have come to nothing, where no leader does."""
        return problem

    def _verdict_of_others(self, part: Part) -> Verdict | None:  # noqa: ARG002
        """Return the error that members of other hosts have found, to a member that waits without a leader."""
        return None

    def _wait(self, part: Part, seen: int, has_news: Callable[[], bool]) -> bool:
        """Wait until another member may have written something; False if none has in a while."""
        if self.closed:
            self.require_open(part.frame.call)
        has_come = self._sleep(seen, has_news, part.pause)
        if not has_come:
            self.wait_longer(part, self._missing())
        return has_come

    def _sleep(self, seen: int, has_news: Callable[[], bool], pause: Callable[[], float]) -> bool:
        """Wait until there are news or an event, first without sleeping; False if there was no event in the pause.

        Args:
            seen: The number of events before this member looked whether it has to wait.
            has_news: Returns whether another member has written what this one waits for.
            pause: Returns the longest sleep, in seconds.
        """
        until = time.perf_counter() + self._spin_seconds
        while time.perf_counter() < until:
            if has_news():
                return True
        # Who writes looks at `sleeping` after its write and a fence; who is about to sleep looks for news after setting
        # `sleeping` and a fence. So one of the two sees what the other one has written: no wake-up is lost.
        self._window.sleeping[self._slot] = True
        self._window.fence()
        try:
            return has_news() or self._links.loop.wait(seen, pause())
        finally:
            self._window.sleeping[self._slot] = False

    def _problem(self) -> Verdict | None:
        """Return the verdict on an exchange that a member has ended, or that a missing one will never enter.

        None unless a rank of the host is dead, or the window has a problem: every call looks there first.
        """
        text = self._window.ended(self.sequence)
        if text:
            kind = CollectiveTimeoutError if text[0] == _TIMEOUT else CollectiveError
            return Verdict(Outcome.ERROR, error=kind(text[1:]))
        # A failed rank is reported before a lost one: it may exit because of its failure, and that is the cause.
        frames = self.unit_frames()
        if any(frame.kind is FrameKind.FAILED for frame in frames.values()):
            return conclude(self.ranks, frames, None)
        lost = [member for member in self._missing_here() if self.lost_reason(member)]
        leader = self._members[_LEADER]
        if not self._is_led() and leader not in lost and self.lost_reason(leader):
            lost.append(leader)  # it came, and is gone
        if not lost:
            return None
        return Verdict(Outcome.ERROR, error=self.lost_error(self.call, lost))

    def _is_led(self) -> bool:
        """Return whether the leader is in this exchange, and will publish a verdict."""
        return self._window.has_arrived(_LEADER, self.sequence) and not self._lost_reason_in(_LEADER)

    def _verdict(self) -> Verdict | None:
        """Return the verdict of the leader; None if there is none yet."""
        window, slot = self._window, self._window.verdict_slot
        if not window.has_arrived(slot, self.sequence):
            return None
        window.fence()
        return self._decoded(window.body(slot, self.sequence))

    # What the leader publishes for a verdict, and the verdict that others read there.
    _encoded = staticmethod(Verdict.encode)
    _decoded = staticmethod(Verdict.decode)

    def _is_late(self, part: Part) -> bool:
        """Return whether this member, which does not lead, waits no longer."""
        return part.is_late

    def _give_up(self, part: Part) -> Verdict:
        """End the exchange after the timeout."""
        return self._end_for_all(self.timeout_error(part, self._late()))

    def _end_for_all(self, error: RankwiseError) -> Verdict:
        """End the exchange for all members, unless the leader has just published a verdict."""
        kind = _TIMEOUT if isinstance(error, CollectiveTimeoutError) else _LOSS
        self._window.set_ended(self._slot, self.sequence, f"{kind}{error}")
        self._wake_others()
        deadline = time.monotonic() + self._leader_seconds
        while self._is_led() and time.monotonic() < deadline:
            seen = self._links.loop.num_events
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            self._links.loop.wait(seen, _LEADER_CHECK_SECONDS)
        return Verdict(Outcome.ERROR, error=error)

    def _publish(self, verdict: Verdict) -> None:
        """Write the verdict, and wake the other members."""
        body = self._encoded(verdict)
        frame = Frame(FrameKind.VERDICT, "", body=body, group=self.group, sequence=self.sequence)
        self._window.write(self._window.verdict_slot, frame, has_room=self._has_room)
        if verdict.outcome is Outcome.ERROR:
            self._wake_others()
        else:
            self._wake_sleeping(range(1, self._num_slots))

    def _missing(self) -> list[int]:
        """Return the members that are not known to be in the exchange."""
        return self._missing_here()

    def _missing_here(self) -> list[int]:
        """Return the members on this host that are not in the exchange."""
        slots = range(self._num_slots)
        return [self._members[slot] for slot in slots if not self._window.has_arrived(slot, self.sequence)]

    def _wake_sleeping(self, slots: Sequence[int]) -> None:
        """Wake those of these members that sleep, or are about to, after something was written for them."""
        self._window.fence()
        for slot in slots:
            if self._window.sleeping[slot]:
                self.page.wake(self._indices[slot])

    def _wake_others(self) -> None:
        for slot, index in enumerate(self._indices):
            if slot != self._slot:
                self.page.wake(index)

    def _check_meeting(self, meeting: PageMeeting, timeout: float, start: float) -> None:
        """Raise if a member that has not come to a meeting is gone, or if it has not come for so long."""
        self.require_open(self.call)
        self._refresh()
        lost = self._lost()
        if lost:
            time.sleep(LOSS_SECONDS)  # another one may have died, because of which these have left
            self._refresh()
            lost = self._lost()
        self._window.fence()  # a member may come to the meeting, and leave after it
        missing = meeting.missing()
        reasons = [f"{self._name_in(slot)} {lost[slot]}" for slot in missing if slot in lost]
        if reasons:
            raise CollectiveError(f"{self.call} failed: {'; '.join(reasons)}")
        if missing and elapsed_since(start) > timeout:
            slow = ", ".join(map(self._name_in, missing))
            raise CollectiveTimeoutError(f"{self.call}: no data from {slow} for {timeout:g} s")

    def _lost(self) -> dict[int, str]:
        """Return why members of this host are gone, by slot."""
        return {slot: why for slot in range(self._num_slots) if (why := self._lost_reason_in(slot))}

    def _refresh(self) -> None:
        self._links.loop.wait(self._links.loop.num_events, 0.0)

    def set_unverified(self, number: int) -> None:
        super().set_unverified(number)
        self._window.unverified[self._slot] = number

    def _unverified_of(self, member: int) -> int | None:
        return self._window.unverified[self._members.index(member)]

    def _last_call(self, member: int) -> str:
        return self._window.last_call(self._members.index(member))

    def _entered(self, member: int) -> tuple[str, int, float] | None:
        return self._window.ongoing_call(self._members.index(member))
