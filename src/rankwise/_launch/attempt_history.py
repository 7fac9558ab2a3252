"""The history of a launch that restarts its ranks: how each attempt failed, and whether another one may help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankwise._launch.oom import count_oom_kills, oom_explanation
from rankwise._launch.report import EarlierAttempts, describe_end
from rankwise.errors import RankFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that has failed.

    Attributes:
        failures: The failures, the first in time first.
        world_size: The number of ranks on all hosts.
        step: The highest step that a rank has reported; None if none has.
        oom_text: The explanation of SIGKILL by the kernel's counters; "" if there is none.
    """

    failures: tuple[RankFailure, ...]
    world_size: int
    step: int | None = None
    oom_text: str = ""

    @property
    def cause(self) -> str:
        """The first failure, in one line."""
        first = self.failures[0]
        end = describe_end(first, self.oom_text)
        at_step = "" if self.step is None else f", at step {self.step}"
        return f"rank {first.rank} of {self.world_size} on {first.host} {end}{at_step}"

    def fails_like(self, other: FailedAttempt) -> bool:
        """Return whether both have failed in the same way, at the same step: a reported one."""
        first, second = self.failures[0], other.failures[0]
        alike = (first.rank, first.exitcode, first.raised) == (second.rank, second.exitcode, second.raised)
        return alike and self.step is not None and self.step == other.step


@dataclass(slots=True)
class AttemptHistory:
    """The attempts before the current one.

    Attributes:
        most: How many attempts are allowed.
        restarts_left: How many may follow the current one.
        earlier: Those attempts.
        elsewhere: The failures of the last attempt on all hosts, if the ranks of this one were only stopped.
        consequences: The failures on other hosts, if the cause of the last attempt's failure is on this one.
        lost: Which host was lost in the current attempt, and why; "" if none was.
        given_up: Why no other attempt follows the current one, although restarts are left; "" if that is not so.
        stacks: Those of ranks that were killed in the current attempt, as lines of the report.
        oom_kills: The kernel's counters when the current attempt began.
    """

    most: int
    restarts_left: int
    earlier: list[FailedAttempt] = field(default_factory=list)
    elsewhere: Sequence[RankFailure] = ()
    consequences: Sequence[RankFailure] = ()
    lost: str = ""
    given_up: str = ""
    stacks: str = ""
    oom_kills: dict[str, int] = field(default_factory=count_oom_kills)

    def begin_attempt(self) -> None:
        """Note that ranks are started."""
        self.elsewhere = self.consequences = ()
        self.lost = ""
        self.oom_kills = count_oom_kills()

    def explain_oom(self) -> str:
        """Return the explanation of SIGKILL in this attempt by the kernel's counters; "" if there is none."""
        return oom_explanation(self.oom_kills, count_oom_kills())

    @property
    def report(self) -> EarlierAttempts:
        """The earlier attempts, for the report of the last one, and the stacks of this one."""
        lines = [
            f"\nattempt {number} of {self.most} had failed before: {attempt.cause}"
            for number, attempt in enumerate(self.earlier, 1)
        ]
        text = "".join(lines) + (f"\nnot restarted again: {self.given_up}" if self.given_up else "") + self.stacks
        return EarlierAttempts([attempt.failures for attempt in self.earlier], text)


def reason_to_give_up(attempts: Sequence[FailedAttempt]) -> str:
    """Return why another attempt would fail too; "" if it may succeed, which it may where no rank reports progress.

    Args:
        attempts: All attempts, the last one included, in order.
    """
    *before, last = attempts
    number = len(attempts)
    if before and last.fails_like(before[-1]):
        return f"attempts {number - 1} and {number} failed in the same way, at step {last.step}"
    reached = [attempt.step for attempt in before[:-1] if attempt.step is not None]
    if reached and all(attempt.step is None or attempt.step <= max(reached) for attempt in attempts[-2:]):
        return (
            f"attempts {number - 1} and {number} did not get beyond step {max(reached)}, which an earlier one reached"
        )
    return ""
