"""The jobs of this host: processes with the variables of a launcher, each with the processes that it has started."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rankwise._diagnose.processes import DiagnosisError, Process, command_of, environ_of, is_python, own_processes
from rankwise._environment.detect import detect
from rankwise._rank_files import marked_rank
from rankwise.errors import RankwiseError

_LAUNCH_ID: Final = "RANKWISE_LAUNCH"  # `reaper.LAUNCH_ID`, in a package above this one
# With which its value begins if it is that of one rank alone, as where an engine has started each rank by itself.
OF_ONE_RANK: Final = "rank-"
# In the command line of the process that watches the ranks.
WATCHER: Final = "rankwise._diagnose.watcher"
_ADDRESS: Final = ("MASTER_ADDR", "MASTER_PORT")
_STARTED_BY_FIRST: Final = "lightning"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRank:
    """A rank on this host.

    Attributes:
        rank: The global rank.
        process: The process of the rank.
        workers: The Python processes that it has started, such as those of a data loader.
    """

    rank: int
    process: Process
    workers: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The ranks of a job on this host.

    Attributes:
        launcher: The name of the launcher, as `detect` returns it.
        world_size: The number of ranks on all hosts.
        ranks: The ranks here, in order.
        one_host: The launcher has started all ranks here, as it says; it need not say that.
        ancestors: The processes that have started all of them, such as the launcher.
    """

    launcher: str
    world_size: int
    ranks: tuple[HostRank, ...]
    one_host: bool = False
    ancestors: frozenset[int] = frozenset()

    @property
    def pid(self) -> int:
        """The process id of the lowest rank here, by which the job is named."""
        return self.ranks[0].process.pid

    @property
    def absent(self) -> list[int]:
        """The ranks that are not here."""
        return sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks})

    @property
    def processes(self) -> set[int]:
        """The process ids of the ranks and their workers."""
        return {process.pid for rank in self.ranks for process in (rank.process, *rank.workers)}


@dataclass(frozen=True, slots=True)
class _Identity:
    """The rank of a job that a process claims to be."""

    job: tuple[str, ...]
    launcher: str
    world_size: int
    rank: int
    one_host: bool = False
    local_rank: int = 0


def find_jobs() -> list[Job]:
    """Return the jobs of this user on this host, in the order in which they were started.

    Raises:
        DiagnosisError: There is no /proc.
    """
    processes = own_processes()
    claims = {pid: claim for pid, process in processes.items() if (claim := _identity(process)) is not None}
    ranks = _without_launchers(claims, processes)
    firsts = _firsts(ranks, claims, processes)
    claims |= firsts
    ranks |= firsts.keys()
    jobs: dict[tuple[str, ...], list[int]] = {}
    for pid in sorted(ranks, key=lambda pid: processes[pid].started):
        jobs.setdefault(claims[pid].job, []).append(pid)
    found = [group for pids in jobs.values() for group in _distinct(pids, claims, processes)]
    return [_job({claims[pid].rank: pid for pid in reversed(pids)}, ranks, claims, processes) for pids in found]


def _launch_id(environ: Mapping[str, str]) -> str:
    """Return the id of the launch of rankwise that a process belongs to; "" for none."""
    launch = environ.get(_LAUNCH_ID, "")
    return "" if launch.startswith(OF_ONE_RANK) else launch


def _distinct(
    pids: list[int], claims: Mapping[int, _Identity], processes: Mapping[int, Process]
) -> Iterable[list[int]]:
    """Separate jobs whose variables are the same, such as two of mpiexec, or one beside the rest of another."""
    if len({claims[pid].rank for pid in pids}) == len(pids):
        return [pids]
    by_parent: dict[int, list[int]] = {}
    for pid in pids:
        by_parent.setdefault(processes[pid].parent, []).append(pid)
    return by_parent.values()


def find_job(pid: int | None) -> Job:
    """Return the job that a process belongs to, as rank, worker or launcher; without one, the only job.

    Raises:
        DiagnosisError: There is no such job, or more than one.
    """
    jobs = find_jobs()
    if pid is not None:
        found = [job for job in jobs if pid in job.processes]
        found = found or [job for job in jobs if pid in job.ancestors]
    else:
        found = jobs
    names = ", ".join(f"{job.pid} ({job.launcher}, {job.world_size} ranks)" for job in found or jobs)
    if len(found) == 1:
        return found[0]
    if found:
        raise DiagnosisError(f"there are {len(found)} jobs to choose from: give the process id of one of {names}")
    expected = "a process of a job" if pid is None else f"process {pid} of a job"
    others = f"; the jobs of this host are {names}" if jobs else ": no process of this user has the variables of one"
    raise DiagnosisError(f"{expected} was not found on this host{others}")


def _identity(process: Process) -> _Identity | None:
    """Return the rank that a process claims to be; None for none."""
    pid = process.pid
    environ = environ_of(pid)
    marked = marked_rank(pid)
    if marked is not None:
        # setproctitle writes a title over the variables of a rank; its fork server has the id of the launch too.
        launch = _launch_id(environ) or _launch_id(environ_of(process.parent))
        if launch:
            return _Identity(("rankwise", launch), "rankwise", marked.world_size, marked.rank)
    if not environ:
        return None
    try:
        facts = detect(environ)
        launcher = facts.launcher
    except RankwiseError:
        launcher = "none"  # half of a launcher's variables: another program's
    if launcher == "none":  # a rank by the arguments of init()
        return None if marked is None else _Identity(("init",), "arguments", marked.world_size, marked.rank)
    if not is_python(pid):  # after `detect`, since few processes have the variables
        return None
    launch = _launch_id(environ)
    if launcher == "rankwise" and launch:  # as a marked rank, which may have started this process
        return _Identity((launcher, launch), launcher, facts.world_size.value, facts.rank.value)
    where = [*(environ.get(name, "") for name in _ADDRESS), launch]
    job_id = "" if facts.job is None else str(facts.job.value)
    key = (launcher, job_id, str(facts.world_size.value), *where)
    return _Identity(
        key,
        launcher,
        facts.world_size.value,
        facts.rank.value,
        one_host=facts.is_one_host,
        local_rank=0 if facts.local_rank is None else facts.local_rank.value,
    )


def _without_launchers(claims: Mapping[int, _Identity], processes: Mapping[int, Process]) -> set[int]:
    """Return the ranks: not the processes that a rank has started, nor launchers that were started as ranks."""
    ranks = set(claims)
    for pid in claims:
        for above in _ancestors(pid, processes):
            if above in claims and above != os.getpid():
                if claims[above] == claims[pid]:
                    ranks.discard(pid)  # it has inherited the variables
                else:
                    ranks.discard(above)  # it runs an inner launcher
    return ranks - {os.getpid()}


def _firsts(ranks: set[int], claims: Mapping[int, _Identity], processes: Mapping[int, Process]) -> dict[int, _Identity]:
    """Return the ranks that have started the other ranks of their host, and have no variables: those of Lightning."""
    found: dict[int, _Identity] = {}
    for pid in ranks:
        claim, parent = claims[pid], processes[pid].parent
        is_other = claim.launcher == _STARTED_BY_FIRST and claim.local_rank > 0
        if is_other and parent in processes and parent not in claims and is_python(parent):
            found[parent] = replace(claim, rank=claim.rank - claim.local_rank, local_rank=0)
    return found


def _ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent not in {0, 1, *found}:
        pid = process.parent
        found.append(pid)
    return found


def _job(
    of_rank: Mapping[int, int], ranks: Container[int], claims: Mapping[int, _Identity], processes: Mapping[int, Process]
) -> Job:
    pids = list(of_rank.values())
    ancestors = set.intersection(*(set(_ancestors(pid, processes)) for pid in pids))
    members = [
        HostRank(rank=rank, process=processes[pid], workers=tuple(_workers(pid, ranks, processes)))
        for rank, pid in sorted(of_rank.items())
    ]
    claim = claims[pids[0]]
    return Job(
        launcher=claim.launcher,
        world_size=claim.world_size,
        ranks=tuple(members),
        one_host=claim.one_host,
        ancestors=frozenset(ancestors),
    )


def _workers(rank: int, ranks: Container[int], processes: Mapping[int, Process]) -> Iterable[Process]:
    for pid, process in sorted(processes.items()):
        above = next((above for above in _ancestors(pid, processes) if above in ranks), None)
        is_below = above == rank and pid not in ranks and is_python(pid)
        if is_below and not any(WATCHER in word for word in command_of(pid)):
            yield process
