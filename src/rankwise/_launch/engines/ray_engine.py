"""Ray: a placement group for each launch, and an actor for each rank."""

from __future__ import annotations

import contextlib
import importlib.util
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankwise._arguments import as_seconds
from rankwise._dependencies import missing_package
from rankwise._launch.engines import ray_actor
from rankwise._launch.engines.interface import RankJob, RankOutcome
from rankwise.errors import InvalidArgumentError, LaunchError, shown, summary

# How long the others may take to fail by themselves, and to be stopped, after the first failure.
_FAIL_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 10.0


@dataclass(slots=True, kw_only=True)
class _RayJob:
    """A submitted job: its placement group, its actors and their results, by rank, and whether all ranks have ended."""

    job: RankJob
    group: Any
    actors: list[Any] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngine:
    """Ray as the engine of launches: the resources of the ranks in a cluster of Ray.

    A placement group has a bundle for each node, on different nodes, and an actor in it for each rank. Ranks are
    numbered by node, and there by GPU. The rank is a child process of the actor, and meets the others at the address
    of rank zero's node. The cluster that `ray.init` has connected this process to is used; otherwise this calls
    `ray.init()`, which finds a cluster or starts one on this host, and `ray.shutdown()` at the end. Ray prints the
    output of ranks. Needs the package ray: `pip install ray`.

    Attributes:
        gpus_per_rank: The number of GPUs of each rank.
        cpus_per_rank: The number of CPUs of each rank.
        resources: Other resources of each rank, by name, as Ray counts them.
        environ: Variables for the ranks, in addition to those of Ray's workers: they do not have the caller's.
        timeout: So many seconds the cluster may take to have the resources free, and to start the actors.

    Raises:
        InvalidArgumentError: A value is not as above.

    Example:
        >>> RayEngine(gpus_per_rank=1).name
        'ray'
    """

    name: str = field(default="ray", init=False)
    gpus_per_rank: float = 0
    cpus_per_rank: float = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 300.0
    _jobs: dict[str, _RayJob] = field(default_factory=dict, init=False, repr=False, compare=False)
    _started: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        as_seconds(self.timeout, "timeout")
        for name, amount in self._amounts().items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
                raise InvalidArgumentError(f"{shown(amount)} is not an amount of {name}")

    def submit(self, jobs: Sequence[RankJob]) -> list[str]:
        """Reserve the resources of jobs, and start their ranks; return the ids of the jobs.

        Raises:
            MissingDependencyError: Ray is not installed.
            LaunchError: There is no cluster, or it has not had the resources in time.
        """
        if importlib.util.find_spec("ray") is None:
            raise missing_package("Ray as an engine", "ray")
        import ray  # noqa: PLC0415 - an extra

        if not ray.is_initialized():
            try:
                ray.init()
            except Exception as error:
                raise LaunchError(f"there is no cluster of Ray: {summary(error)}") from error
            self._started.append(True)
        ids: list[str] = []
        try:
            ids.extend(map(self._submit, jobs))
        except BaseException:
            for job_id in ids:
                self.cancel(job_id)
            self._shut_down()
            raise
        return ids

    def wait(self, job_id: str) -> Sequence[RankOutcome]:
        """Wait until all ranks of a job have ended, and return their outcomes; after a failure, stop the others.

        Raises:
            LaunchError: There is no such job.
        """
        found = self._job(job_id)
        outcomes: dict[int, RankOutcome] = {}
        while len(outcomes) < found.job.world_size and not any(one.failure for one in outcomes.values()):
            self._collect(found, outcomes, seconds=None)
        deadline = time.monotonic() + _FAIL_SECONDS
        while len(outcomes) < found.job.world_size and (left := deadline - time.monotonic()) > 0:
            self._collect(found, outcomes, seconds=left)
        if len(outcomes) < found.job.world_size:
            self._stop(found)
            deadline = time.monotonic() + _STOP_SECONDS
            while len(outcomes) < found.job.world_size and (left := deadline - time.monotonic()) > 0:
                self._collect(found, outcomes, seconds=left)
        found.has_ended = len(outcomes) == found.job.world_size
        for rank in set(range(found.job.world_size)) - outcomes.keys():
            outcomes[rank] = RankOutcome.lost(
                rank, host=found.hosts[rank], why="it did not end after another had failed", stopped=True
            )
        self.cancel(job_id)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def cancel(self, job_id: str) -> None:
        """End the actors of a job and what they have started, and give its resources back."""
        found = self._jobs.pop(job_id, None)
        if found is None:
            return
        import ray  # noqa: PLC0415 - an extra
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415

        if ray.is_initialized():
            if not found.has_ended:
                self._stop(found)
            for actor in found.actors:
                ray.kill(actor)
            remove_placement_group(found.group)
        if not self._jobs:
            self._shut_down()

    def logs(self, job_id: str) -> Mapping[int, Sequence[Path]]:
        """Raise an error: Ray prints the output of ranks in this process, and has its files on their nodes.

        Raises:
            LaunchError: Always.
        """
        raise LaunchError(
            f"Ray prints the output of job {job_id} in the process that has launched it, and keeps it on the nodes, in "
            "session_latest/logs of its temporary folder: `ray logs` shows these files"
        )

    def _amounts(self) -> dict[str, float]:
        return {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank, **self.resources}

    def _job(self, job_id: str) -> _RayJob:
        if job_id not in self._jobs:
            raise LaunchError(f"job {job_id} is not one that this process has submitted to Ray and not waited for")
        return self._jobs[job_id]

    def _shut_down(self) -> None:
        if self._started:
            import ray  # noqa: PLC0415 - an extra

            self._started.clear()
            ray.shutdown()

    def _submit(self, job: RankJob) -> str:
        from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415 - an extra

        amounts = {name: amount for name, amount in self._amounts().items() if amount}
        bundle = {name: amount * job.nproc for name, amount in amounts.items()}
        group = placement_group([bundle] * job.nnodes, strategy="STRICT_SPREAD" if job.nnodes > 1 else "STRICT_PACK")
        found = _RayJob(job=job, group=group)
        try:
            self._start(found, bundle)
        except BaseException:
            remove_placement_group(group)
            raise
        job_id = uuid.uuid4().hex[:8]
        self._jobs[job_id] = found
        return job_id

    def _start(self, found: _RayJob, bundle: Mapping[str, float]) -> None:
        """Start the actors, number them, and start their ranks."""
        import ray  # noqa: PLC0415 - an extra

        if not found.group.wait(self.timeout):
            raise LaunchError(
                f"Ray did not have {found.job.nnodes} nodes with {dict(bundle)} free in {self.timeout:g} s: it has "
                f"{ray.available_resources()} of {ray.cluster_resources()} in all; ask for less, or raise timeout="
            )
        try:
            placed = ray_actor.start(found.group, found.job, self._amounts(), self.timeout)
            found.actors, found.hosts = [one.actor for one in placed], [one.host for one in placed]
            variables = ray_actor.variables_by_rank(placed, self.timeout)
            found.results = [
                actor.run.remote(found.job, rank, {**self.environ, **variables[rank]})
                for rank, actor in enumerate(found.actors)
            ]
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray could not start the actors of the ranks: {summary(error)}") from error

    @staticmethod
    def _collect(found: _RayJob, outcomes: dict[int, RankOutcome], *, seconds: float | None) -> None:
        """Wait until another rank has ended, for so many seconds at most, and add its outcome."""
        import ray  # noqa: PLC0415 - an extra

        pending = {found.results[rank]: rank for rank in range(found.job.world_size) if rank not in outcomes}
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=seconds)
        for result in ready:
            rank = pending[result]
            try:
                outcomes[rank] = ray.get(result).on(found.hosts[rank])
            except ray.exceptions.RayError as error:
                why = f"its actor has ended: {summary(error)}"
                outcomes[rank] = RankOutcome.lost(rank, host=found.hosts[rank], why=why, time_ns=time.time_ns())

    @staticmethod
    def _stop(found: _RayJob) -> None:
        """End the ranks that are running, and what they have started."""
        import ray  # noqa: PLC0415 - an extra

        with contextlib.suppress(ray.exceptions.RayError):
            stopping = [actor.stop.remote() for actor in found.actors]
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS) if stopping else None
