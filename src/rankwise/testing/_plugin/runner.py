"""Running one test on its ranks, phase by phase: setup, call, teardown.

There is a barrier after each phase, so that no rank tears down a fixture that another rank uses. A rank that fails
passes the barriers without waiting: it leaves the session at once, and the collectives of the other ranks end with an
error instead of a deadlock. `messages` describes the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rankwise._launch.oom import count_oom_kills, oom_explanation
from rankwise.errors import LaunchError
from rankwise.testing._plugin import timeouts
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
from rankwise.testing._plugin.results import RankResult, WorldResult, is_failure
from rankwise.testing._plugin.worker_pool import WorkerPool


class PhaseRunner:
    """One test while its ranks run it."""

    def __init__(
        self, pool: WorkerPool, size: int, timeout: float, on_debugger: Callable[[], object] = lambda: None
    ) -> None:
        """Prepare for a test.

        Args:
            pool: All running ranks; the first ones run the test.
            size: The world size of the test.
            timeout: The time limit of the test in seconds, from the moment when all ranks have started it.
            on_debugger: Called when a debugger is entered on a rank.
        """
        self._results = {rank: RankResult() for rank in range(size)}
        self._pool = pool
        self._timeout = timeout
        self._phase = PHASES[0]
        self._started: set[int] = set()
        self._released: set[int] = set()  # ranks that failed or skipped, and wait at no barrier any more
        self._runs_body = True
        self._pytest_exit: tuple[str, int | None] | None = None
        # Times on the monotonic clock, each with the message if it passes. The deadline is first that of the start,
        # then that of the whole test. The grace deadline is that of one phase, and exists only after a failure in it.
        reason = f"the tests could not be collected within {timeouts.START_SECONDS:g} s"
        self._deadline = (time.monotonic() + timeouts.START_SECONDS, reason)
        self._grace_deadline: tuple[float, str] | None = None
        self._first_failed: int | None = None
        self._stop_reason = ""
        self._oom_kills = count_oom_kills()
        self._on_debugger = on_debugger
        self._debugged: set[int] = set()
        self._debugged_since = 0.0

    def wait_until_started(self) -> None:
        """Wait until the ranks, to which the test has been sent, start it."""
        self._wait(self._all_started)

    def limit(self, seconds: float, reason: str) -> None:
        """Stop the ranks in this many seconds, unless the test is over by then or has an earlier deadline."""
        self._deadline = min(self._deadline, (time.monotonic() + seconds, reason))

    def run(self) -> WorldResult:
        """Run all phases, and return the result."""
        for self._phase in PHASES:
            self._begin_phase()
            if not self._wait(self._phase_is_over):
                break
        else:
            self._wait(self._test_is_over)
        stopped = self._stop_unfinished_ranks() if self._stop_reason else ()
        if not self._runs_body:  # then each rank's report of the body is the skip that `rank_session` has raised
            for result in self._results.values():
                result.phases.pop("call", None)
        return WorldResult(
            by_rank=self._results, stopped=stopped, stop_reason=self._stop_reason, pytest_exit=self._pytest_exit
        )

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Handle messages until a condition holds; False if the ranks are to be stopped instead, or have all ended."""
        try:
            if self._pool.wait(condition, lambda: self._next_deadline()[0]):
                return True
            self._stop_reason = self._next_deadline()[1]
        except pytest.fail.Exception as timeout:  # raised by pytest-timeout's signal handler, wherever this process is
            self._stop_reason = str(timeout)
        except LaunchError as error:
            self._receive()
            for result in self._results.values():
                result.ended = result.ended or f"ended: {error}"
        return False

    def _begin_phase(self) -> None:
        """Release the ranks that wait at the barrier before a phase. The body runs on all ranks or on none."""
        if self._phase == "setup":
            return
        self._first_failed = self._grace_deadline = None  # no rank waits any more for one that failed before
        waiting = {
            rank for rank, result in self._results.items() if not result.is_complete and rank not in self._released
        }
        if self._phase == "call":
            self._runs_body = len(waiting) == len(self._results)
        for rank in waiting:
            self._pool.ranks[rank].send(self._runs_body or self._phase == "teardown")

    def _all_started(self) -> bool:
        self._receive()
        return self._have_started()

    def _phase_is_over(self) -> bool:
        self._receive()
        return all(self._phase in result.phases or result.is_complete for result in self._results.values())

    def _test_is_over(self) -> bool:
        self._receive()
        return all(result.is_complete for result in self._results.values())

    def _receive(self) -> None:
        """Handle the messages of the ranks, and the ends of their processes."""
        for number, result in self._results.items():
            rank = self._pool.ranks[number]
            messages, rank.messages = rank.messages, []
            for message in messages:
                self._handle(number, result, message)
            if not rank.is_running and not result.is_complete:
                self._handle_end(
                    number, result, rank.describe_end(number, oom_explanation(self._oom_kills, count_oom_kills()))
                )
                result.stack = rank.stack()

    def _handle(self, rank: int, result: RankResult, message: Any) -> None:  # noqa: ANN401 - one of several classes
        if isinstance(message, Started):
            self._handle_start(rank)
        elif isinstance(message, PhaseReport):
            self._handle_phase(rank, result, message)
        elif isinstance(message, SubtestReport):
            result.subtests.append(message)
        elif isinstance(message, RecordedWarning):
            result.warnings.append(message)
        elif isinstance(message, DebuggerEvent):
            self._handle_debugger(rank, entered=message.entered)
        elif isinstance(message, Finished):
            result.leaks, result.keeps_group = message.leaks, message.keeps_group
        elif isinstance(message, Aborted):
            self._pytest_exit = self._pytest_exit or message.pytest_exit
            self._handle_end(rank, result, message.text)
        elif message.failure:  # the fork server's WorkerResult: the function that runs the tests has raised
            self._handle_end(rank, result, f"failed outside of the test\n{message.failure.traceback}")

    def _handle_start(self, rank: int) -> None:
        self._started.add(rank)
        self._pool.ranks[rank].new_output()  # drop the output of modules that were imported
        if len(self._started) == len(self._results):
            reason = f"timeout: not over within {self._timeout:g} s"
            self._deadline = (time.monotonic() + self._timeout, reason)
        if self._first_failed is not None:
            self._begin_grace(self._first_failed)

    def _handle_phase(self, rank: int, result: RankResult, phase: PhaseReport) -> None:
        result.phases[phase.when] = phase
        result.printed[phase.when] = self._pool.ranks[rank].new_output()
        if phase.when != "teardown" and phase.report["outcome"] != "passed":
            # Not at the barrier: the others may wait in a collective for this rank, and learn of its failure only when
            # it leaves the session in its teardown.
            self._released.add(rank)
            self._pool.ranks[rank].send(True)
        if is_failure(phase):
            self._begin_grace(rank)

    def _handle_end(self, rank: int, result: RankResult, ending: str) -> None:
        result.ended, result.ended_ns = ending, time.monotonic_ns()
        result.printed[self._phase] = self._pool.ranks[rank].new_output()
        self._handle_debugger(rank, entered=False)
        self._begin_grace(rank)

    def _handle_debugger(self, rank: int, *, entered: bool) -> None:
        """Suspend all deadlines while a debugger is open on any rank."""
        if entered:
            if not self._debugged:
                self._debugged_since = time.monotonic()
                self._on_debugger()
            self._debugged.add(rank)
        elif self._debugged == {rank}:
            self._debugged.clear()
            elapsed = time.monotonic() - self._debugged_since
            self._deadline = (self._deadline[0] + elapsed, self._deadline[1])
            if self._grace_deadline is not None:
                self._grace_deadline = (self._grace_deadline[0] + elapsed, self._grace_deadline[1])
        else:
            self._debugged.discard(rank)

    def _begin_grace(self, rank: int) -> None:
        """Set the deadline of the other ranks in a phase that one rank has failed, once all have started."""
        if self._first_failed is None:
            self._first_failed = rank
        if self._have_started() and self._grace_deadline is None:
            seconds = timeouts.GRACE_AFTER_FAILURE_SECONDS
            reason = f"stopped: not over {seconds:g} s after rank {self._first_failed} had failed"
            self._grace_deadline = (time.monotonic() + seconds, reason)

    def _have_started(self) -> bool:
        return all(rank in self._started or result.is_complete for rank, result in self._results.items())

    def _next_deadline(self) -> tuple[float, str]:
        if self._debugged:
            return time.monotonic() + timeouts.DEBUGGER_WAIT_SECONDS, ""
        return self._deadline if self._grace_deadline is None else min(self._deadline, self._grace_deadline)

    def _stop_unfinished_ranks(self) -> tuple[int, ...]:
        """Request the stacks of the ranks that have not ended the phase, and kill these ranks."""
        unfinished = tuple(
            rank
            for rank, result in self._results.items()
            if not result.is_complete and self._phase not in result.phases
        )
        for rank, stack in self._pool.collect_stacks(unfinished).items():
            self._results[rank].stack = stack
        self._pool.kill(unfinished)
        for rank in unfinished:
            self._results[rank].printed[self._phase] = self._pool.ranks[rank].new_output()
        return unfinished
