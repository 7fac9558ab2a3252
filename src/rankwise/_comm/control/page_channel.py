"""A channel through the page of the host: members write their frames into memory that all of them can read.

The first member leads. It waits for the frames of the others, of which the last one wakes it, computes the verdict,
and wakes them up: one wake-up for each member, whatever the collective. The others wait for the verdict. Where there is
no leader yet, each member notices by itself that another one is gone, or that a timeout has expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rankwise.errors import CollectiveError, CollectiveTimeoutError

_LEADER: Final = 0
# How long a member whose timeout has expired waits for the verdict of a leader that is there: the leader may have
# received all frames just before.
_LEADER_SECONDS: Final = 1.0
_LEADER_CHECK_SECONDS: Final = 0.05
# The number of exchanges that a member may be ahead of others before it waits for them. Only one that fails in each of
# them gets so far.
_MAX_EXCHANGES_AHEAD: Final = 1000
_AHEAD_SECONDS: Final = 0.005


class PageChannel(Channel):
    """The exchanges of one group whose members are all on this host.

    Attributes:
        page: The page of the host.
    """

    def __init__(self, group: int, ranks: Sequence[int], links: Links, page: HostPage) -> None:
        self._window = page.attach(group, len(ranks))  # before the links know of the group: it may raise
        super().__init__(group, ranks, links)
        self.page = page
        self._own_arrivals = self._window.arrivals[self.own]
        self._indices = [page.ranks.index(rank) for rank in ranks]
        # The last exchange whose frames were those of all members: none of them reads the frames before any more.
        self._last_complete = 0
        self._has_room = True
        self._meeting: PageMeeting | None = None
        self._pipes: Pipes | None = None

    @property
    def same_host(self) -> bool:
        return True

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self._require_open(frame.call)
        self._enter(frame, time.monotonic())
        if self.own == _LEADER:
            self._publish(conclude(self.ranks, self._frames() | {self.own: frame}, None))
        self._window.fence()
        self._window.finished[self.own] = self.sequence
        start = time.monotonic()
        while timeout is not None and (slow := self._behind(self.sequence - _MAX_EXCHANGES_AHEAD)):
            if elapsed_since(start) > timeout:
                names = ", ".join(self._links.name(self.ranks[member]) for member in slow)
                raise CollectiveTimeoutError(f"{frame.call}: {names} read nothing for {timeout:g} s")
            self._require_open(frame.call)
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
        self._require_open(self.call)
        if self._pipes is None:
            self._pipes = Pipes(
                self.page.map_staging(self._window, len(self.ranks) ** 2 * pipe_bytes(len(self.ranks)), PIPES_START),
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
            self._require_open(self.call)
            meeting = self._meeting = self._meeting or PageMeeting(self._window, self.own, self.page.spin_seconds)
            yield partial(meeting.meet, partial(self._check_meeting, meeting, timeout))

    def pending_call(self, rank: int) -> Frame | None:
        if rank not in self.ranks:
            return None
        member = self.ranks.index(rank)
        if not self._window.has_arrived(member, self.sequence + 1) or self.lost_reason(member):
            return None
        frame = self._window.read(member, self.sequence + 1)
        return frame if frame.kind is FrameKind.CALL else None

    def lost_reason(self, member: int) -> str:
        left = "" if member == self.own else self._window.left(member)
        return left or (CLOSED if self._indices[member] in self.page.dead else "")

    def _arrivals_at(self, sequence: int) -> list[float]:
        # A member may have come to the next exchange, and written over its arrival at the oldest one.
        if sequence < self.sequence + 2 - ARRIVALS:
            return []
        return [arrivals[sequence % ARRIVALS] for arrivals in self._window.arrivals]

    def _leave(self, reason: str) -> None:
        self._window.set_left(self.own, reason)
        self._wake_others()

    def _free(self) -> None:
        self._pipes = None
        self.page.detach(self._window, len(self.ranks))

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
    #   (`_verdict_after_timeout`). Either the leader sees the timeout, and publishes it, or it had published before.
    # - A leader that is gone publishes nothing. Each member then finds by itself who is missing (`_problem`), from the
    #   same memory, which nobody changes any more: so all find the same. It looks for a verdict again first, of a
    #   leader that published and left between two looks.
    #
    # The frames of an exchange stay readable until all members have come to the next one but one: `finished` tells a
    # writer when it may write over them. While others have not come so far, it writes to the ring instead.
    def _exchange(self, part: Part) -> Verdict:
        self._enter(part.frame, part.start)
        try:
            verdict = self._lead(part) if self.own == _LEADER else self._follow(part)
            if verdict.outcome is not Outcome.ERROR:
                self._last_complete = self.sequence
            if verdict.outcome is Outcome.AGREED and part.read:
                verdict.bodies = {member: self._window.body(member, self.sequence) for member in part.read}
            return verdict
        finally:
            self._window.fence()
            self._window.finished[self.own] = self.sequence

    def _enter(self, frame: Frame, now: float) -> None:
        """Write this member's frame of the next exchange, and wake the leader."""
        if self._last_complete != self.sequence and self._behind(self.sequence + 2 - RING_ENTRIES):
            self.close(f"ended {RING_ENTRIES} collectives that other ranks have not come to")
            self._require_open(frame.call)
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence = self.group, self.sequence
        self._own_arrivals[self.sequence % ARRIVALS] = now
        # No member reads the frames of the exchange any more whose room those of this one need.
        self._has_room = self._last_complete == self.sequence - 1 or not self._behind(self.sequence - 2)
        self._window.write(self.own, frame, has_room=self._has_room)
        if frame.kind is not FrameKind.CALL and frame.kind is not FrameKind.DETAILS:
            self._wake_others()  # those that wait without a leader, too
        elif self.own != _LEADER:
            self._window.fence()
            # The last member that comes wakes the leader: before, it has nothing to do.
            if self._window.num_arrived(self.sequence) >= len(self.ranks):
                self._wake_sleeping([_LEADER])

    def _behind(self, sequence: int) -> list[int]:
        """Return the members that have not finished an exchange yet, and will."""
        finished = self._window.finished[: len(self.ranks)].tolist()
        behind = [member for member, last in enumerate(finished) if last < sequence]
        return [member for member in behind if member != self.own and not self.lost_reason(member)]

    def _lead(self, part: Part) -> Verdict:
        """Wait for the frames of all members, and publish the verdict."""
        size = len(self.ranks)
        while True:
            seen = self._links.loop.num_events
            num_arrived = self._window.num_arrived(self.sequence)
            self._window.fence()
            verdict = self._problem() if self.page.dead or self._window.has_problem(self.sequence) else None
            if verdict is None and num_arrived == size:
                bodies = self._window.bodies_of_calls(self.sequence, part.frame.digest)
                if bodies is None:
                    verdict = conclude(self.ranks, self._frames(), part.combine)
                else:
                    verdict = combined(bodies, part.combine)
                if self._window.has_problem(self.sequence):
                    verdict = self._problem() or verdict  # a timeout has expired meanwhile
            if verdict is None and part.waited > part.timeout:
                verdict = Verdict(Outcome.ERROR, error=self._timeout_error(part, self._missing()))
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
                    return self._verdict() or problem
            if part.waited > part.timeout:
                return self._verdict_after_timeout(self._timeout_error(part, self._missing() or [_LEADER]))
            self._wait(part, seen, partial(self._window.has_arrived, self._window.verdict_slot, self.sequence))

    def _wait(self, part: Part, seen: int, has_news: Callable[[], bool]) -> None:
        """Wait until another member may have written something."""
        if self.closed:
            self._require_open(part.frame.call)
        if not self._sleep(seen, has_news, part.pause):
            self._wait_longer(part, self._missing())

    def _sleep(self, seen: int, has_news: Callable[[], bool], pause: Callable[[], float]) -> bool:
        """Wait until there are news or an event, first without sleeping; False if there was no event in the pause.

        Args:
            seen: The number of events before this member looked whether it has to wait.
            has_news: Returns whether another member has written what this one waits for.
            pause: Returns the longest sleep, in seconds.
        """
        until = time.perf_counter() + self.page.spin_seconds
        while time.perf_counter() < until:
            if has_news():
                return True
        # Who writes looks at `sleeping` after its write and a fence; who is about to sleep looks for news after setting
        # `sleeping` and a fence. So one of the two sees what the other one has written: no wake-up is lost.
        self._window.sleeping[self.own] = True
        self._window.fence()
        try:
            return has_news() or self._links.loop.wait(seen, pause())
        finally:
            self._window.sleeping[self.own] = False

    def _problem(self) -> Verdict | None:
        """Return the verdict on an exchange that a member has ended, or that a missing one will never enter.

        None unless a rank of the host is dead, or the window has a problem: every call looks there first.
        """
        text = self._window.timed_out(self.sequence)
        if text:
            return Verdict(Outcome.ERROR, error=CollectiveTimeoutError(text))
        # A failed rank is reported before a lost one: it may exit because of its failure, and that is the cause.
        frames = self._frames()
        if any(frame.kind is FrameKind.FAILED for frame in frames.values()):
            return conclude(self.ranks, frames, None)
        lost = [member for member in self._missing() if self.lost_reason(member)]
        if not self._is_led() and _LEADER not in lost and self.lost_reason(_LEADER):
            lost.append(_LEADER)  # it came, and is gone
        if not lost:
            return None
        return Verdict(Outcome.ERROR, error=self._lost_error(self.call, lost))

    def _is_led(self) -> bool:
        """Return whether the leader is in this exchange, and will publish a verdict."""
        return self._window.has_arrived(_LEADER, self.sequence) and not self.lost_reason(_LEADER)

    def _verdict(self) -> Verdict | None:
        """Return the verdict of the leader; None if there is none yet."""
        window, slot = self._window, self._window.verdict_slot
        if not window.has_arrived(slot, self.sequence):
            return None
        window.fence()
        return Verdict.decode(window.body(slot, self.sequence))

    def _verdict_after_timeout(self, error: CollectiveTimeoutError) -> Verdict:
        """End the exchange for all members, unless the leader has just published a verdict."""
        self._window.set_timed_out(self.own, self.sequence, str(error))
        self._wake_others()
        deadline = time.monotonic() + _LEADER_SECONDS
        while self._is_led() and time.monotonic() < deadline:
            seen = self._links.loop.num_events
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            self._links.loop.wait(seen, _LEADER_CHECK_SECONDS)
        return Verdict(Outcome.ERROR, error=error)

    def _publish(self, verdict: Verdict) -> None:
        """Write the verdict, and wake the other members."""
        frame = Frame(FrameKind.VERDICT, "", body=verdict.encode(), group=self.group, sequence=self.sequence)
        self._window.write(self._window.verdict_slot, frame, has_room=self._has_room)
        if verdict.outcome is Outcome.ERROR:
            self._wake_others()
        else:
            self._wake_sleeping(range(1, len(self.ranks)))

    def _frames(self) -> dict[int, Frame]:
        """Return the frames of the exchange that have been written, by group rank."""
        members = range(len(self.ranks))
        arrived = [member for member in members if self._window.has_arrived(member, self.sequence)]
        self._window.fence()
        return {member: self._window.read(member, self.sequence) for member in arrived}

    def _missing(self) -> list[int]:
        """Return the members that are not in the exchange."""
        return [member for member in range(len(self.ranks)) if not self._window.has_arrived(member, self.sequence)]

    def _wake_sleeping(self, members: Sequence[int]) -> None:
        """Wake those of these members that sleep, or are about to, after something was written for them."""
        self._window.fence()
        for member in members:
            if self._window.sleeping[member]:
                self.page.wake(self._indices[member])

    def _wake_others(self) -> None:
        for member, index in enumerate(self._indices):
            if member != self.own:
                self.page.wake(index)

    def _check_meeting(self, meeting: PageMeeting, timeout: float, start: float) -> None:
        """Raise if a member that has not come to a meeting is gone, or if it has not come for so long."""
        self._require_open(self.call)
        self._refresh()
        lost = self._lost()
        if lost:
            time.sleep(LOSS_SECONDS)  # another one may have died, because of which these have left
            self._refresh()
            lost = self._lost()
        self._window.fence()  # a member may come to the meeting, and leave after it
        missing = meeting.missing()
        reasons = [f"{self._links.name(self.ranks[member])} {lost[member]}" for member in missing if member in lost]
        if reasons:
            raise CollectiveError(f"{self.call} failed: {'; '.join(reasons)}")
        if missing and elapsed_since(start) > timeout:
            slow = ", ".join(self._links.name(self.ranks[member]) for member in missing)
            raise CollectiveTimeoutError(f"{self.call}: no data from {slow} for {timeout:g} s")

    def _lost(self) -> dict[int, str]:
        return {member: why for member in range(len(self.ranks)) if (why := self.lost_reason(member))}

    def _refresh(self) -> None:
        self._links.loop.wait(self._links.loop.num_events, 0.0)

    def set_unverified(self, number: int) -> None:
        super().set_unverified(number)
        self._window.unverified[self.own] = number

    def _unverified_of(self, member: int) -> int | None:
        return self._window.unverified[member]

    def _last_call(self, member: int) -> str:
        return self._window.last_call(member)

    def _entered(self, member: int) -> tuple[str, int, float] | None:
        return self._window.ongoing_call(member)
