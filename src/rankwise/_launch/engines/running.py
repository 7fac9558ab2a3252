"""Functions whose ranks an engine runs, their results, and their failures in the form of those of this host."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, TypeVar

from rankwise._arguments import as_integer
from rankwise._launch.engines.interface import NO_TERMINAL, Engine, RankJob, RankOutcome
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.function_call import FunctionCall
from rankwise._launch.report import describe_failures
from rankwise._pickling import loads
from rankwise.errors import InvalidArgumentError, LaunchError, RankFailedError, shown, summary

GROUP: Final = "rankwise.engines"
_METHODS: Final = ("submit", "wait", "cancel", "logs")

R = TypeVar("R")
# What the arguments of `launch` that describe this host mean, and what to do instead.
_HOST_ARGUMENTS: Final = {
    "nodes": "an engine chooses the hosts: give it their number as nnodes",
    "output": "the output of ranks is not shown here as it comes: it is in the engine's logs",
    "backend": "ranks on XLA devices start on the host that makes the call",
    "preload": "each rank is a new interpreter, and inherits no modules",
    "hosts": "an engine chooses the hosts: give it their number as nnodes",
    "max_restarts": "an engine starts each job once",
    "timeout": "an engine has a limit of its own",
    "environ": "an engine passes on the variables of this process: set it there",
    "hang_dir": "set RANKWISE_HANG_DIR",
}


def find_engine(on: str | Engine) -> Engine:
    """Return the engine of a name, with its defaults, or the engine itself.

    Raises:
        InvalidArgumentError: There is no engine of that name, or the object is none.
        LaunchError: The engine of that name cannot be loaded.
    """
    if not isinstance(on, str):
        _check(on, f"on={shown(on)}")
        return on
    found: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if on not in found:
        raise InvalidArgumentError(
            f"on={on!r} is not an engine; there are {', '.join(sorted(found)) or 'none, as rankwise is not installed'}"
            ", and None for this host"
        )
    try:
        engine = found[on].load()()
    except Exception as error:
        raise LaunchError(f"engine {on!r} ({found[on].value}) cannot be loaded: {summary(error)}") from error
    _check(engine, f"engine {on!r} ({found[on].value})")
    return engine  # type: ignore[no-any-return]  # checked


def _check(engine: object, what: str) -> None:
    missing = [name for name in _METHODS if not callable(getattr(engine, name, None))]
    if missing or isinstance(engine, type) or not isinstance(getattr(engine, "name", None), str):
        raise InvalidArgumentError(
            f"{what} is not an engine: it has no {', '.join(missing) or 'name, or is a class'}; an engine is an object "
            "as in rankwise.extend.engines"
        )


def outcomes_on(
    fn: Callable[..., R],
    arguments: Iterable[Sequence[Any]],
    *,
    on: str | Engine,
    nproc: int | None,
    nnodes: int | None,
    refused: Sequence[str],
) -> Generator[tuple[int, list[R] | LaunchError], None, None]:
    """Run a function in the ranks of a job for each of several arguments.

    Yields the number of each job, with the results of its ranks, or the error of those that failed. The jobs are
    cancelled when this process is interrupted, and when the generator is closed before the last has ended.

    Args:
        fn: The function.
        arguments: The arguments of the function in each job.
        on: The engine, or its name.
        nproc: The number of ranks on each node.
        nnodes: The number of nodes; None for one.
        refused: Which arguments of `launch` were given that no engine has.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        LaunchError: The job was refused, or its engine has ended.
    """
    if refused:
        raise InvalidArgumentError(f"{refused[0]}= and on= exclude each other: {_HOST_ARGUMENTS[refused[0]]}")
    engine = find_engine(on)
    jobs = [_job(fn, args, nproc=nproc, nnodes=nnodes) for args in arguments]
    job_ids = engine.submit(jobs) if jobs else []
    try:
        for index, (job, job_id) in enumerate(zip(jobs, job_ids, strict=True)):
            outcomes = engine.wait(job_id)
            try:
                results: list[R] | LaunchError = results_of(outcomes, job, engine, job_id)
            except LaunchError as error:
                results = error
            yield index, results
    except BaseException:
        _cancel_all(engine, job_ids)
        raise


def results_of(outcomes: Sequence[RankOutcome], job: RankJob, engine: Engine, job_id: str) -> list[Any]:
    """Return the return values of the ranks, by rank.

    Raises:
        RankFailedError: A rank failed. Its cause is the exception of the first one, if that could be pickled.
        LaunchError: The engine has left out a rank.
    """
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    if sorted(by_rank) != list(range(job.world_size)):
        raise LaunchError(
            f"engine {engine.name!r} returned the outcomes of the ranks {shown(sorted(by_rank))} of job {job_id}, and "
            f"not those of {job.world_size} ranks"
        )
    raise_failed(outcomes, engine, job_id)
    return [loads(by_rank[rank].value, on_cpu=True) if by_rank[rank].value else None for rank in sorted(by_rank)]


def raise_failed(outcomes: Sequence[RankOutcome], engine: Engine, job_id: str) -> None:
    """Raise an error if any rank of a job has failed.

    Raises:
        RankFailedError: A rank failed. Its cause is the exception of the first one, if that could be pickled.
    """
    failed = sorted((one for one in outcomes if one.failure), key=lambda one: (one.consequence, one.time_ns, one.rank))
    if not failed:
        return
    cause: BaseException | None = None
    if failed[0].error:
        with contextlib.suppress(Exception):  # only that rank may know its class; its text is in the report
            cause = loads(failed[0].error, on_cpu=True)
    failures = [one.failure for one in failed if one.failure]
    text = describe_failures(failures, len(outcomes))
    raise RankFailedError(f"{text}\n{_where(engine, job_id, failures[0].rank)}", failures=failures) from cause


def _where(engine: Engine, job_id: str, rank: int) -> str:
    with contextlib.suppress(LaunchError):
        files = engine.logs(job_id).get(rank, ())
        if files:
            return f"job {job_id} of {engine.name}; the output of rank {rank} is in {' and '.join(map(str, files))}"
    return f"job {job_id} of {engine.name}"


def _job(fn: Callable[..., Any], args: Sequence[Any], *, nproc: int | None, nnodes: int | None) -> RankJob:
    if not callable(fn):
        raise InvalidArgumentError(f"launch takes a function and its arguments, got {shown(fn)}")
    return RankJob(
        nproc=_count(nproc, "nproc"),
        nnodes=_count(1 if nnodes is None else nnodes, "nnodes"),
        name=getattr(fn, "__qualname__", type(fn).__qualname__),
        kind=TargetKind.FUNCTION,
        argv=tuple(map(str, getattr(sys, "argv", ()))),
        call=pickle.dumps(FunctionCall.of(fn, tuple(args), setup=NO_TERMINAL)),
    )


def _count(value: int | None, name: str) -> int:
    number = as_integer(value, name)
    if number < 1:
        raise InvalidArgumentError(f"{name}={number} is not a number from 1 on")
    return number


def _cancel_all(engine: Engine, job_ids: Sequence[str]) -> None:
    """Cancel jobs. The error that has led to that is the one to raise."""
    for job_id in job_ids:
        with contextlib.suppress(LaunchError):
            engine.cancel(job_id)
