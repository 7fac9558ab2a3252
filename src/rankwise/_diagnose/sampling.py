"""A sample of a job: the stack of each rank, by the way that is open, and what the kernel knows of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final

from rankwise._diagnose import py_spy
from rankwise._diagnose.jobs import HostRank, find_jobs
from rankwise._diagnose.processes import (
    DiagnosisError,
    Process,
    has_communicator,
    main_thread_times,
    read_process,
    wait_channel,
)
from rankwise._diagnose.stack import Stack, parse_stacks
from rankwise._rank_files import request_stacks

_SIGNAL_SECONDS: Final = 1.0
_THREADS: Final = 8
_LATE: Final = "its stack was not read in time"
# States in which a process handles no signal.
_CANNOT_ANSWER: Final = frozenset("TtD")
# States in which a process runs no code, with the words for them.
STATES: Final = {
    "T": "stopped by a signal (SIGCONT continues it)",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait of the kernel",
    "Z": "ended, but not waited for by its parent",
    "X": "ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A process at one moment.

    Attributes:
        pid: The process.
        state: As in `Process`; "X" if it has ended.
        channel: The function of the kernel that it waits in; "" if there is none.
        cpu_seconds: CPU time that all of its threads have used.
        run_seconds: CPU time that its main thread has used.
        delay_seconds: How long its main thread has waited for a core.
        stack: The stack of its main thread; None if it could not be read.
        reason: Why it could not.
        waits_for_device: It waits for an accelerator, whose queue may have a collective.
    """

    pid: int
    state: str
    channel: str = ""
    cpu_seconds: float = 0.0
    run_seconds: float = 0.0
    delay_seconds: float = 0.0
    stack: Stack | None = None
    reason: str = ""
    waits_for_device: bool = False

    @property
    def location(self) -> str:
        """Where it is, with its state if it cannot run."""
        stopped = STATES.get(self.state, "")
        if self.stack is not None:
            return f"{self.stack.location}, {stopped}" if stopped else self.stack.location
        if stopped:
            return f"{stopped}{f', in {self.channel}' if self.channel else ''}"
        return f"no stack: state {self.state}{f', in {self.channel}' if self.channel else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """A rank at one moment, and the processes that it has started."""

    rank: int
    process: ProcessSample
    workers: tuple[ProcessSample, ...] = ()


def sample_ranks(ranks: Iterable[HostRank], *, native: bool = False) -> list[RankSample]:
    """Return a sample of each rank, taken at about the same time."""

    def sample(process: Process) -> ProcessSample:
        return sample_process(process.pid, native=native)

    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [
            (rank.rank, pool.submit(sample, rank.process), [pool.submit(sample, worker) for worker in rank.workers])
            for rank in ranks
        ]
        return [
            RankSample(rank=rank, process=own.result(), workers=tuple(worker.result() for worker in workers))
            for rank, own, workers in futures
        ]


def sample_in_time(pids: Mapping[int, int], seconds: float) -> list[RankSample]:
    """Return samples of launched ranks and of their workers; those that take too long have no stack.

    Args:
        pids: The process of each rank, or a process such as a shell that has started it.
        seconds: How long it may take.
    """
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rankwise-stacks")
    taken = [
        (
            rank,
            pool.submit(sample_process, rank.process.pid),
            [pool.submit(sample_process, each.pid) for each in rank.workers],
        )
        for rank in _launched(pids)
    ]
    wait([future for _, own, workers in taken for future in (own, *workers)], seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    return [
        RankSample(
            rank=rank.rank,
            process=_taken(own, rank.process.pid, rank.process.state),
            workers=tuple(
                _taken(future, each.pid, each.state) for future, each in zip(workers, rank.workers, strict=True)
            ),
        )
        for rank, own, workers in taken
    ]


def sample_process(pid: int, *, native: bool = False) -> ProcessSample:
    """Return a sample of a process."""
    process = read_process(pid)
    if process is None:
        return ProcessSample(pid=pid, state="X", reason="it has ended")
    run, delay = main_thread_times(pid)
    sample = ProcessSample(
        pid=pid,
        state=process.state,
        channel=wait_channel(pid),
        cpu_seconds=process.cpu_seconds,
        run_seconds=run,
        delay_seconds=delay,
    )
    if process.state in {"Z", "X"}:
        return replace(sample, reason="it has ended")
    found = py_spy.read_stack(pid, native=native)
    # After py-spy, which has no effect on the process: a signal ends a system call such as sleep() of C early.
    if not isinstance(found, Stack) and process.state not in _CANNOT_ANSWER:
        found = parse_stacks(request_stacks(pid, _SIGNAL_SECONDS)) or found
    if not isinstance(found, Stack):
        return replace(sample, reason=found)
    return replace(sample, stack=found, waits_for_device=found.reads_device and has_communicator(pid))


def _taken(future: Future[ProcessSample], pid: int, state: str) -> ProcessSample:
    if future.done() and not future.cancelled():
        return future.result()
    return ProcessSample(pid=pid, state=state, reason=_LATE)


def _launched(pids: Mapping[int, int]) -> list[HostRank]:
    """Return ranks with the processes that they have started; for a program such as a shell, its Python process."""
    found: dict[int, HostRank] = {}
    with contextlib.suppress(DiagnosisError):
        found = {
            rank.rank: rank
            for job in find_jobs()
            for rank in job.ranks
            if pids.get(rank.rank, 0) in _with_ancestors(rank.process)
        }
    for number, pid in pids.items():
        process = read_process(pid)
        if number not in found and process is not None:
            found[number] = HostRank(rank=number, process=process)
    return [found[number] for number in pids if number in found]


def _with_ancestors(process: Process) -> Iterator[int]:
    above: Process | None = process
    while above is not None:
        yield above.pid
        above = read_process(above.parent)
