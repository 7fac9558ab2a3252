"""Which of the errors of several hosts is reported: that of a host that is lost, else the first that is a cause."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from rankwise._launch.other_hosts.messages import HostEnded
from rankwise._pickling import loads
from rankwise.errors import LaunchError, RankFailedError, RankwiseError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProblem:
    """Why a host has ended.

    Attributes:
        host: The host, as the user has named it.
        error: The error.
        ended: The report of its launcher; None if the host is lost, or could not be used.
    """

    host: str
    error: RankwiseError
    ended: HostEnded | None = None

    @property
    def failures(self) -> RankFailedError | None:
        """The error of its ranks; None if it is another one."""
        return self.error if isinstance(self.error, RankFailedError) else None


def error_of(problems: Sequence[HostProblem]) -> tuple[RankwiseError, BaseException | None]:
    """Return the error of a launch, and its cause.

    Args:
        problems: Those of the hosts, in the order of time.
    """
    lost = [problem for problem in problems if problem.ended is None]
    failed = [problem for problem in problems if problem.failures is not None]
    if lost:
        return _lost(lost, failed), None
    origin = next((problem for problem in failed if problem.ended is not None and problem.ended.is_origin), None)
    if origin is not None:
        return origin.error, _cause(origin)
    first = next((problem for problem in problems if problem.failures is None), problems[0])
    return (first.error if first.failures else type(first.error)(f"host {first.host}: {first.error}")), None


def stopped_error(problems: Sequence[HostProblem]) -> RankwiseError | None:
    """Return the error of ranks that had failed before the launch was stopped, or while it was; None if none had."""
    failed = [problem for problem in problems if problem.failures is not None]
    return error_of(failed)[0] if failed else None


def _lost(lost: Sequence[HostProblem], failed: Sequence[HostProblem]) -> RankwiseError:
    """Return the error that hosts are lost, with what ranks of the others have raised."""
    text = "\n".join(str(problem.error) for problem in lost)
    errors = [problem.failures for problem in failed if problem.failures is not None]
    found = next((error for error in errors if not all(failure.stopped for failure in error.failures)), None)
    if found is None:
        return LaunchError(text)
    return RankFailedError(f"{text}\n{found}", failures=found.failures, earlier=found.attempts[:-1])


def _cause(origin: HostProblem) -> BaseException | None:
    with contextlib.suppress(Exception):  # only that rank may know its class; its text is in the report
        if origin.ended is not None and origin.ended.cause:
            found = loads(origin.ended.cause)
            return found if isinstance(found, BaseException) else None
    return None
