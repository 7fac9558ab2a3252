"""Running a plan: torch's elastic agent brings rendezvous, membership and restarts; the ranks are those of our pool."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.distributed.elastic.agent.server import SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import ProcessFailure

from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.launched_rank import RankProcess
from rankwise._launch.oom import count_oom_kills, oom_explanation
from rankwise._launch.report import describe_failures, failed_before, failures_of, raise_failures
from rankwise._launch.spec import LaunchSpec
from rankwise._launch.supervisor import FAILED, TERMINATED, Supervisor, interrupted
from rankwise._rendezvous.elastic import LoopbackRendezvous, multi_node_rendezvous
from rankwise.errors import RankFailedError

# How long the agent waits for its ranks before it looks whether nodes want to join.
_LOOK_SECONDS: Final = 1.0
_TALKATIVE: Final = "torch.distributed.elastic.agent.server.api"


class RankAgent(SimpleElasticAgent):
    """Torch's agent over a pool."""

    def __init__(self, spec: WorkerSpec, plan: LaunchSpec, pool: Supervisor) -> None:
        super().__init__(spec)
        self._plan = plan
        self._pool = pool

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        if attempt:
            told = describe_failures(failures_of(self._pool.ranks), workers[0].world_size)
            self._pool.say(f"rankwise: attempt {attempt} of {worker_group.spec.max_restarts + 1} failed: {told}")
        requests = {
            worker.global_rank: self._plan.request(_variables(worker_group, worker, attempt)) for worker in workers
        }
        with self._stopping():
            self._pool.start(requests)
        return {worker.local_rank: self._pool.ranks[worker.global_rank].pid for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._pool.ranks
        deadline = time.monotonic() + _LOOK_SECONDS
        with self._stopping():
            while self._pool.running() and not any(rank.has_failed for rank in ranks.values()):
                if (left := deadline - time.monotonic()) <= 0:
                    return RunResult(state=WorkerState.HEALTHY)
                self._pool.wait(left)
                for rank in ranks.values():
                    rank.note_whether_it_lingers(self._plan.grace)
        failures = {
            worker.global_rank: _failure(worker, ranks[worker.global_rank])
            for worker in worker_group.workers
            if ranks[worker.global_rank].has_failed
        }
        if failures:
            return RunResult(state=WorkerState.FAILED, failures=failures)
        self._pool.stop(FAILED)  # whatever ranks that are done have left
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - the pool knows them
        self._pool.stop(FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002 - ours
        self._pool.stop(FAILED)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Return an event that says nothing: nobody reads it, and torch's asks the name server for this host's name."""
        return Event(f"torchelastic.worker.status.{state}", source=source)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Pass on to the ranks what stops the launcher."""
        try:
            yield
        except KeyboardInterrupt:
            self._pool.stop(interrupted(self._plan.grace), telling=True)
            raise
        except SystemExit:
            self._pool.stop(TERMINATED, telling=True)
            raise


def run_ranks(plan: LaunchSpec, pool: Supervisor) -> dict[int, RankProcess]:
    """Start the ranks of a plan, wait for all of them, and return how they ended.

    The first failure ends the others.

    Raises:
        RankFailedError: A rank failed.
        LaunchError: The ranks could not be started.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended; its cause is what ranks had raised by themselves.
    """
    killed = count_oom_kills()
    try:
        size = _conduct(plan, pool)
    except (KeyboardInterrupt, SystemExit) as stop:
        try:
            raise_failures(failed_before(pool.ranks, pool.stopped_ns), plan.nproc)
        except RankFailedError as failed:
            raise stop from failed
        raise
    raise_failures(
        pool.ranks, size, returning=plan.kind is TargetKind.FUNCTION, kernel=oom_explanation(killed, count_oom_kills())
    )
    return pool.ranks


def _conduct(plan: LaunchSpec, pool: Supervisor) -> int:
    """Run a plan to its end, and return how many ranks its world had.

    The agent and its store live here alone: an error of the ranks is raised where nothing refers to them, so whoever
    keeps the error does not keep a store open.
    """
    rendezvous = (
        LoopbackRendezvous(uuid.uuid4().hex, plan.ports) if plan.nodes is None else multi_node_rendezvous(plan.nodes)
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.nproc,
        entrypoint=plan.name,
        rdzv_handler=rendezvous,
        max_restarts=plan.max_restarts,
        monitor_interval=1e-6,  # the pool waits, and for what happens
    )
    agent = RankAgent(spec, plan, pool)
    with _quiet():
        try:
            agent.run()
        finally:
            rendezvous.shutdown()
    workers = agent.get_worker_group().workers
    return workers[0].world_size if workers else plan.nproc


def _variables(group: WorkerGroup, worker: Worker, attempt: int) -> dict[str, str]:
    """Return what torchrun tells a rank of its place."""
    spec = group.spec
    return {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
    }


def _failure(worker: Worker, rank: RankProcess) -> ProcessFailure:
    return ProcessFailure(
        local_rank=worker.local_rank, pid=rank.pid, exitcode=rank.exitcode or 0, error_file=os.devnull
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's log to itself: what it says of a failure, the report says better."""

    def silence(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    logger = logging.getLogger(_TALKATIVE)
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)
