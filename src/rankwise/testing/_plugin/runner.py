"""Leading ranks through a test, one phase after the other: fixtures, body, fixtures again.

All ranks are through with a phase before any of them begins the next, so no rank closes what another still uses. A rank
that fails goes ahead to the end, which tells those that wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from rankwise._launch.oom import count_oom_kills, oom_explanation
from rankwise.errors import LaunchError
from rankwise.testing._plugin.messages import (
    PHASES,
    Aborted,
    DebuggerEvent,
    Finished,
    PhaseReport,
    RecordedWarning,
    Started,
    SubtestReport,
)
from rankwise.testing._plugin.worker_pool import WorkerPool

# How long ranks that are alive may take to start, with the modules of the tests.
START_SECONDS: Final = 120.0
# How long the others get to fail by themselves after the first failure.
_GRACE_SECONDS: Final = 2.0
# How long to wait at a time for somebody who debugs.
_DEBUGGING_SECONDS: Final = 3600.0


@dataclass(slots=True, kw_only=True)
class RankResult:
    """How a test went on one rank.

    Attributes:
        phases: By name.
        printed: What it printed in each, on stdout and stderr.
        ended: How the rank ended before the test did, "" if it did not.
        ended_ns: When that was heard of, on the host's monotonic clock.
        stack: Its stacks where it was stopped, or crashed.
        left: What the test left behind; None if the rank did not get so far.
        joined: A process group stays open on it, of a fixture of wider scope.
        asides: Reports of subtests.
        warned: Its warnings.
    """

    phases: dict[str, PhaseReport] = field(default_factory=dict)
    printed: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: str = ""
    ended_ns: int = 0
    stack: str = ""
    left: tuple[str, ...] | None = None
    joined: bool = False
    asides: list[SubtestReport] = field(default_factory=list)
    warned: list[RecordedWarning] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """It failed, as far as it got."""
        return bool(self.ended) or any(is_failure(phase) for phase in self.phases.values())

    @property
    def is_over(self) -> bool:
        """There is nothing more to come."""
        return bool(self.ended) or self.left is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """How a test went in a world.

    Attributes:
        attempts: By rank.
        late: The ranks that were stopped because they did not come to an end.
        reason: Why they were: the limit, or the failure of another rank.
        stop: What `pytest.exit` was called with, if it was.
        afterwards: What went wrong when the ranks were ended after it.
    """

    attempts: Mapping[int, RankResult]
    late: tuple[int, ...] = ()
    reason: str = ""
    stop: tuple[str, int | None] | None = None
    afterwards: tuple[str, ...] = ()

    @property
    def left(self) -> list[str]:
        """What the test left behind on any rank."""
        return sorted({text for attempt in self.attempts.values() for text in attempt.left or ()})

    @property
    def is_clean(self) -> bool:
        """The ranks may run another test."""
        return not self.late and not any(
            attempt.has_failed or attempt.left is None or attempt.left for attempt in self.attempts.values()
        )


def is_failure(phase: PhaseReport) -> bool:
    """Return whether a phase failed, expected or not."""
    return phase.report["outcome"] == "failed" or (phase.report["outcome"] == "skipped" and "wasxfail" in phase.report)


class PhaseRunner:
    """One test while it runs."""

    def __init__(
        self, ranks: WorkerPool, size: int, timeout: float, note_debugger: Callable[[], object] = lambda: None
    ) -> None:
        """Prepare.

        Args:
            ranks: All that there are; the first ones run the test.
            size: How many of them.
            timeout: Seconds for the test.
            note_debugger: Called when somebody begins to debug a rank.
        """
        self.attempts = {number: RankResult() for number in range(size)}
        self._ranks = ranks
        self._timeout = timeout
        self._phase = PHASES[0]
        self._begun: set[int] = set()
        self._let_go: set[int] = set()
        self._called = True
        self._stop: tuple[str, int | None] | None = None
        # Until when, on the monotonic clock, and what to say then: for the whole test, and for a phase that one failed.
        self._limit = (time.monotonic() + START_SECONDS, f"the tests could not be collected within {START_SECONDS:g} s")
        self._grace: tuple[float, str] | None = None
        self._first_failed: int | None = None
        self._stopped = ""
        self._kills = count_oom_kills()
        self._note_debugger = note_debugger
        self._debugged: set[int] = set()
        self._debugged_since = 0.0

    def gather(self) -> None:
        """Wait until the ranks, which have been told of the test, begin it."""
        self._wait(self._are_gathered)

    def limit(self, seconds: float, reason: str) -> None:
        """Stop the ranks so many seconds from now, if the test is not over by then nor has to be sooner."""
        self._limit = min(self._limit, (time.monotonic() + seconds, reason))

    def conduct(self) -> WorldResult:
        """Lead the ranks through the test."""
        for self._phase in PHASES:
            self._go_on()
            if not self._wait(self._is_through):
                break
        else:
            self._wait(self._is_over)
        late = self._stop_the_late() if self._stopped else ()
        if not self._called:
            for attempt in self.attempts.values():
                attempt.phases.pop("call", None)
        return WorldResult(attempts=self.attempts, late=late, reason=self._stopped, stop=self._stop)

    def _wait(self, until: Callable[[], bool]) -> bool:
        """Wait until the ranks are so far; False if they are to be stopped instead, or have all ended."""
        try:
            if self._ranks.wait(until, lambda: self._nearest_limit()[0]):
                return True
            self._stopped = self._nearest_limit()[1]
        except pytest.fail.Exception as timeout:  # of pytest-timeout, which raises wherever this process is
            self._stopped = str(timeout)
        except LaunchError as error:
            self._listen()
            for attempt in self.attempts.values():
                attempt.ended = attempt.ended or f"ended: {error}"
        return False

    def _go_on(self) -> None:
        """Tell the ranks to begin with a phase; the body begins only where the fixtures of all are there."""
        if self._phase == "setup":
            return
        self._first_failed = self._grace = None  # nobody waits any more for one that failed before
        ready = {
            number for number, attempt in self.attempts.items() if not attempt.is_over and number not in self._let_go
        }
        if self._phase == "call":
            self._called = len(ready) == len(self.attempts)
        for number in ready:
            self._ranks.ranks[number].send(self._called or self._phase == "teardown")

    def _are_gathered(self) -> bool:
        self._listen()
        return self._have_begun()

    def _is_through(self) -> bool:
        self._listen()
        return all(self._phase in attempt.phases or attempt.is_over for attempt in self.attempts.values())

    def _is_over(self) -> bool:
        self._listen()
        return all(attempt.is_over for attempt in self.attempts.values())

    def _listen(self) -> None:
        """Take note of what the ranks have told, and how they have ended."""
        for number, attempt in self.attempts.items():
            rank = self._ranks.ranks[number]
            heard, rank.messages = rank.messages, []
            for message in heard:
                self._note(number, attempt, message)
            if not rank.is_running and not attempt.is_over:
                self._end(number, attempt, rank.describe_end(number, oom_explanation(self._kills, count_oom_kills())))
                attempt.stack = rank.stack()

    def _note(self, number: int, attempt: RankResult, message: Any) -> None:  # noqa: ANN401 - one of several classes
        if isinstance(message, Started):
            self._note_begin(number)
        elif isinstance(message, PhaseReport):
            self._note_phase(number, attempt, message)
        elif isinstance(message, SubtestReport):
            attempt.asides.append(message)
        elif isinstance(message, RecordedWarning):
            attempt.warned.append(message)
        elif isinstance(message, DebuggerEvent):
            self._note_debugged(number, begins=message.begins)
        elif isinstance(message, Finished):
            attempt.left, attempt.joined = message.left, message.joined
        elif isinstance(message, Aborted):
            self._stop = self._stop or message.stop
            self._end(number, attempt, message.text)
        elif message.traceback:  # of what runs the tests
            self._end(number, attempt, f"failed outside of the test\n{message.traceback}")

    def _note_begin(self, number: int) -> None:
        self._begun.add(number)
        self._ranks.ranks[number].new_output()  # by modules, when they were imported
        if len(self._begun) == len(self.attempts):
            self._limit = (time.monotonic() + self._timeout, f"timeout: not over within {self._timeout:g} s")
        if self._first_failed is not None:
            self._hurry(self._first_failed)

    def _note_phase(self, number: int, attempt: RankResult, phase: PhaseReport) -> None:
        attempt.phases[phase.when] = phase
        attempt.printed[phase.when] = self._ranks.ranks[number].new_output()
        if phase.when != "teardown" and phase.report["outcome"] != "passed":
            self._let_go.add(number)
            self._ranks.ranks[number].send(True)
        if is_failure(phase):
            self._hurry(number)

    def _end(self, number: int, attempt: RankResult, how: str) -> None:
        attempt.ended, attempt.ended_ns = how, time.monotonic_ns()
        attempt.printed[self._phase] = self._ranks.ranks[number].new_output()
        self._note_debugged(number, begins=False)
        self._hurry(number)

    def _note_debugged(self, number: int, *, begins: bool) -> None:
        """Let no limit pass while somebody debugs any rank."""
        if begins:
            if not self._debugged:
                self._debugged_since = time.monotonic()
                self._note_debugger()
            self._debugged.add(number)
        elif self._debugged == {number}:
            self._debugged.clear()
            passed = time.monotonic() - self._debugged_since
            self._limit = (self._limit[0] + passed, self._limit[1])
            if self._grace is not None:
                self._grace = (self._grace[0] + passed, self._grace[1])
        else:
            self._debugged.discard(number)

    def _hurry(self, number: int) -> None:
        """Give the others not much longer in a phase that one has failed, once they have begun."""
        if self._first_failed is None:
            self._first_failed = number
        if self._have_begun() and self._grace is None:
            reason = f"stopped: not over {_GRACE_SECONDS:g} s after rank {self._first_failed} had failed"
            self._grace = (time.monotonic() + _GRACE_SECONDS, reason)

    def _have_begun(self) -> bool:
        return all(number in self._begun or attempt.is_over for number, attempt in self.attempts.items())

    def _nearest_limit(self) -> tuple[float, str]:
        if self._debugged:
            return time.monotonic() + _DEBUGGING_SECONDS, ""
        return self._limit if self._grace is None else min(self._limit, self._grace)

    def _stop_the_late(self) -> tuple[int, ...]:
        """Ask those that are not through for their stacks, and kill them."""
        late = tuple(
            number
            for number, attempt in self.attempts.items()
            if not attempt.is_over and self._phase not in attempt.phases
        )
        for number, stack in self._ranks.collect_stacks(late).items():
            self.attempts[number].stack = stack
        self._ranks.kill(late)
        for number in late:
            self.attempts[number].printed[self._phase] = self._ranks.ranks[number].new_output()
        return late
