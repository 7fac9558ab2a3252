"""Starting ranks that run a Python function, and getting back what it returned."""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from rankwise.errors import InvalidArgumentError, RankFailedError, RankFailure
from rankwise.launch.outcome import CALL_FILE, Outcome, outcome_file
from rankwise.launch.plan import Plan, check_nproc, module_command
from rankwise.launch.report import STOPPED, describe

P = ParamSpec("P")
R = TypeVar("R")


def launch(fn: Callable[..., R], *args: Any, nproc: int) -> list[R]:  # noqa: ANN401 - the function's own arguments
    """Run a function in `nproc` new processes on this host, as the ranks of one world, and return what each returned.

    Local to the caller, whose own session, environment and signal handlers stay as they are. In the ranks,
    `rankwise.init()` joins them to each other. Functions and arguments may be anything that cloudpickle can carry:
    lambdas, closures, functions of `__main__` and of notebooks.

    Args:
        fn: What each rank runs.
        *args: What it is called with, the same in each rank.
        nproc: How many ranks.

    Returns:
        The results, by rank.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run, or the function or an
            argument cannot be pickled.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        LaunchError: The ranks could not be started.

    Example:
        >>> import rankwise
        >>> rankwise.launch(lambda x: x * rankwise.get_rank(), 10, nproc=2)
        [0, 10]
    """
    from rankwise.launch.agent import run  # noqa: PLC0415 - imports torch, which takes a second

    check_nproc(nproc)
    with tempfile.TemporaryDirectory(prefix="rankwise-") as name:
        folder = Path(name)
        (folder / CALL_FILE).write_bytes(pickle.dumps((_search_path(), _pickled_call(fn, args))))
        plan = Plan(nproc=nproc, command=module_command("rankwise.launch.worker", [name]))
        failures = run(plan)
        outcomes = {rank: _outcome(folder, rank) for rank in range(nproc)}
    ended = {failure.rank for failure in failures}
    for rank, outcome in outcomes.items():
        # os._exit(0) looks like success to whoever watches processes; a result there is not.
        if rank not in ended and (outcome is None or not outcome.value):
            failures.append(RankFailure(rank=rank, host=socket.gethostname(), exitcode=0))
    if failures:
        raise _failed(failures, outcomes, nproc)
    return [pickle.loads(outcome.value) for outcome in outcomes.values() if outcome is not None]


def _search_path() -> list[str]:
    """Return where the ranks find the caller's modules; "" means the working directory, which they share."""
    return [str(Path(entry).absolute()) for entry in sys.path]


def _pickled_call(fn: Callable[..., R], args: tuple[Any, ...]) -> bytes:
    try:
        call: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise InvalidArgumentError(
            f"{getattr(fn, '__qualname__', fn)!r} and its arguments cannot be carried to other processes: {error}"
        ) from error
    return call


def _outcome(folder: Path, rank: int) -> Outcome | None:
    """Return how the function ended on a rank; None if the process ended first."""
    try:
        outcome: Outcome = pickle.loads(outcome_file(folder, rank).read_bytes())
    except FileNotFoundError:
        return None
    return outcome


def _failed(failures: list[RankFailure], outcomes: dict[int, Outcome | None], nproc: int) -> RankFailedError:
    """Put the failures in order of time, with their tracebacks."""

    def when(failure: RankFailure) -> tuple[int, int]:
        outcome = outcomes[failure.rank]
        if outcome is not None:
            return 1, outcome.time_ns
        # Without an outcome it was killed: by us, as a consequence, or by something else, as a cause.
        return (2, 0) if failure.exitcode == STOPPED else (0, 0)

    ordered = [
        RankFailure(
            rank=failure.rank,
            host=failure.host,
            exitcode=failure.exitcode,
            traceback="" if (outcome := outcomes[failure.rank]) is None else outcome.traceback,
        )
        for failure in sorted(failures, key=when)
    ]
    error = RankFailedError(describe(ordered, nproc), failures=ordered)
    first = outcomes[ordered[0].rank]
    if first is not None and first.error:
        with contextlib.suppress(Exception):  # its class may be known on that rank alone; its text is there
            error.__cause__ = pickle.loads(first.error)
    return error
