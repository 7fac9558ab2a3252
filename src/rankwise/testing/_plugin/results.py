"""The results of a test: on one rank, and on all ranks of its world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankwise.testing._plugin.messages import PhaseReport, RecordedWarning, SubtestReport


@dataclass(slots=True, kw_only=True)
class RankResult:
    """The result of a test on one rank.

    Attributes:
        phases: The reports of its phases, by name.
        printed: Its output in each phase, on stdout and stderr.
        ended: How the rank ended before the test did; "" if it did not.
        ended_ns: When that was noticed, on the host's monotonic clock.
        stack: Its stacks when it was stopped, or crashed.
        leaks: The state that the test left behind; None if the rank did not reach the end of the test.
        keeps_group: A fixture of wider scope keeps a process group open on the rank.
        subtests: The reports of subtests.
        warnings: Its warnings.
    """

    phases: dict[str, PhaseReport] = field(default_factory=dict)
    printed: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: str = ""
    ended_ns: int = 0
    stack: str = ""
    leaks: tuple[str, ...] | None = None
    keeps_group: bool = False
    subtests: list[SubtestReport] = field(default_factory=list)
    warnings: list[RecordedWarning] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """The rank has ended, or one of its phases has failed."""
        return bool(self.ended) or any(is_failure(phase) for phase in self.phases.values())

    @property
    def is_complete(self) -> bool:
        """No more messages of this test will come from the rank."""
        return bool(self.ended) or self.leaks is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """The result of a test on all ranks of its world.

    Attributes:
        by_rank: The result of each rank.
        stopped: The ranks that were killed because they did not end in time.
        stop_reason: Why they were: the time limit, or the failure of another rank.
        pytest_exit: The arguments of `pytest.exit`, if a rank called it.
        shutdown_errors: The errors of ranks that were ended after the test.
    """

    by_rank: Mapping[int, RankResult]
    stopped: tuple[int, ...] = ()
    stop_reason: str = ""
    pytest_exit: tuple[str, int | None] | None = None
    shutdown_errors: tuple[str, ...] = ()

    @property
    def leaks(self) -> list[str]:
        """The state that the test left behind on any rank."""
        return sorted({text for result in self.by_rank.values() for text in result.leaks or ()})

    @property
    def is_clean(self) -> bool:
        """The ranks may run another test."""
        return not self.stopped and not any(
            result.has_failed or result.leaks is None or result.leaks for result in self.by_rank.values()
        )


def is_failure(phase: PhaseReport) -> bool:
    """Return whether a phase failed, expected or not."""
    return phase.report["outcome"] == "failed" or (phase.report["outcome"] == "skipped" and "wasxfail" in phase.report)
