"""The progress of a rank, for its launcher, which does not restart ranks that make none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rankwise._arguments import as_integer
from rankwise._launch.reported_steps import LARGEST_STEP, PROGRESS, own_place, report_timeout
from rankwise._session.environ import process_variables
from rankwise.errors import InvalidArgumentError


def report_progress(step: int) -> None:
    """Report to `rankwise launch` how far this rank has come.

    Local; takes less than 10 us, and may be called by any thread, before `init()` and after `finalize()`. It has no
    effect under other launchers, or where no restart is allowed. With `--max-restarts` the launcher compares the
    highest steps of its attempts, and does not restart ranks that make no progress: when two attempts in a row fail in
    the same way at the same step, or two in a row do not get beyond the highest step of those before.

    Args:
        step: A number, from 0, that grows during the whole training and continues from that of the checkpoint after a
            restart. A step below the highest that this rank has reported is ignored. One rank is enough.

    Raises:
        InvalidArgumentError: It is not an integer, or is negative.

    Example:
        >>> import rankwise
        >>> for step in range(3):
        ...     rankwise.report_progress(step)
    """
    number = step if type(step) is int else as_integer(step, "step")
    if not 0 <= number <= LARGEST_STEP:
        raise InvalidArgumentError(f"step={number} is not from 0 to {LARGEST_STEP}")
    report = _reporter(process_variables().get(PROGRESS, ""))
    if report is not None:
        report(number)


def report_session_timeout(seconds: float) -> None:
    """Report to `rankwise launch` how long this rank waits for others, and so the launcher for other hosts.

    Local.
    """
    report_timeout(process_variables().get(PROGRESS, ""), seconds)


@cache
def _reporter(variable: str) -> Callable[[int], None] | None:
    return own_place(variable)
