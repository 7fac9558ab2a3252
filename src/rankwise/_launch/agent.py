"""The launcher's elastic agent: rendezvous, membership and restarts are torch's, the ranks are the supervisor's."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.agent.server import SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from rankwise._launch.attempts import AttemptHistory, FailedAttempt, reason_to_give_up
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.grace_period import AFTER_FAILURE, AFTER_LOSS, after_interrupt, after_termination
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.report import describe_failures, failed_before, failures_of, raise_failures, raise_lost
from rankwise._launch.reported_steps import ReportedSteps
from rankwise._launch.spec import LaunchSpec
from rankwise._launch.supervisor import Supervisor
from rankwise._launch.torchrun_variables import agreed_attempt, rank_variables
from rankwise._net.job_secret import SECRET, find_secret
from rankwise._rendezvous.elastic import LoopbackRendezvous, multi_node_rendezvous
from rankwise._rendezvous.nodes import STATIC
from rankwise._rendezvous.signed_store import part_of
from rankwise._rendezvous.waiting import WaitingReport
from rankwise.errors import RankFailedError

if TYPE_CHECKING:
    from rankwise._launch.host_failures import HostFailures

# How long the agent waits for its ranks before it checks whether other nodes want to join.
_CHECK_SECONDS: Final = 1.0
# How often a host whose ranks have ended looks whether those of the others have.
_HOSTS_SECONDS: Final = 0.1
_AGENT_LOGGER: Final = "torch.distributed.elastic.agent.server.api"


class RankAgent(SimpleElasticAgent):
    """Torch's elastic agent over a supervisor."""

    def __init__(
        self, worker_spec: WorkerSpec, spec: LaunchSpec, supervisor: Supervisor, history: AttemptHistory
    ) -> None:
        super().__init__(worker_spec)
        self._launch_spec = spec
        self._supervisor = supervisor
        self._history = history
        self._next_attempt = 0
        self._hosts: HostFailures | None = None
        self._steps = ReportedSteps(spec.nproc if spec.max_restarts or spec.nodes else 0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        attempt = agreed_attempt(worker_group, self._next_attempt)
        self._next_attempt = attempt + 1
        requests = {
            worker.global_rank: self._launch_spec.request(
                rank_variables(worker_group, worker, attempt) | self._steps.variables(worker.local_rank)
            )
            for worker in workers
        }
        if self._launch_spec.debugpy is not None and not attempt:
            self._supervisor.pause_timeouts()  # to the end: nothing reports when the client of debugpy stops the rank
        self._history.begin_attempt()
        self._meet_hosts(worker_group)
        with self._forward_stop():
            if self._hosts is not None:
                self._hosts.meet()
            self._supervisor.start(requests, world_size=workers[0].world_size)
        return {worker.local_rank: self._supervisor.ranks[worker.global_rank].pid for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._supervisor.ranks
        deadline = time.monotonic() + _CHECK_SECONDS
        with self._forward_stop():
            # A person who debugs a rank may want to see why others have failed.
            while self._supervisor.running() and (
                self._supervisor.terminal.holder is not None or not self._has_failed()
            ):
                if (left := deadline - time.monotonic()) <= 0:
                    return RunResult(state=WorkerState.HEALTHY)
                self._supervisor.wait(min(left, _HOSTS_SECONDS) if self._hosts is not None else left)
                for rank in ranks.values():
                    rank.update_lingers(self._launch_spec.grace)
        failures = {
            worker.global_rank: _failure(worker, ranks[worker.global_rank])
            for worker in worker_group.workers
            if ranks[worker.global_rank].has_failed
        }
        if failures or self._has_failed():
            if self._hosts is not None:
                self._hosts.announce()
            self._supervisor.stop(AFTER_LOSS if self._hosts is not None and self._hosts.lost else AFTER_FAILURE)
            self._record_failure()
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if self._hosts is not None:
            self._hosts.finish()
            if not self._hosts.all_finished:
                time.sleep(_HOSTS_SECONDS)
                return RunResult(state=WorkerState.HEALTHY)
        self._supervisor.stop(AFTER_FAILURE, keeps_services=True)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _has_failed(self) -> bool:
        elsewhere = self._hosts is not None and self._hosts.have_failed
        return elsewhere or any(rank.has_failed for rank in self._supervisor.ranks.values())

    def _record_failure(self) -> None:
        """Record how the attempt has failed, and give up if another one would fail too."""
        ranks, world_size = self._supervisor.ranks, self._supervisor.world_size
        self._history.stacks = self._supervisor.stacks.kept
        failures, step = failures_of(ranks), self._steps.take_highest()
        if self._hosts is not None:
            first = ranks[failures[0].rank] if failures else None
            was_stopped = first is None or first.was_stopped
            follows = was_stopped or (first is not None and first.result is not None and first.result.consequence)
            elsewhere, step = self._hosts.exchange(failures, consequence=follows, step=step)
            failures = [*elsewhere, *failures] if follows else [*failures, *elsewhere]
            if was_stopped:
                self._history.elsewhere = failures
            elif not follows:
                self._history.consequences = elsewhere
            if self._hosts.lost:
                self._end_without_host(self._hosts)
                return
        attempt = FailedAttempt(
            failures=tuple(failures),
            world_size=world_size,
            step=step,
            oom_text=self._history.explain_oom(),
        )
        if not self._remaining_restarts:
            return
        self._history.given_up = (
            "SIGKILL did not end all processes of the ranks"
            if self._supervisor.has_left
            else reason_to_give_up([*self._history.earlier, attempt])
        )
        if self._history.given_up:
            self._remaining_restarts = 0
            return
        self._history.earlier.append(attempt)
        number, most = len(self._history.earlier), self._history.most
        text = describe_failures(attempt.failures, world_size, oom_text=attempt.oom_text)
        self._supervisor.print_message(f"rankwise: attempt {number} of {most} failed: {text}{self._history.stacks}")

    def _end_without_host(self, hosts: HostFailures) -> None:
        """End an attempt with a lost host; another one follows if the launchers of the others can meet again."""
        self._history.lost = hosts.lost
        nodes = self._launch_spec.nodes
        backend = STATIC if nodes is None else nodes.backend
        if self._remaining_restarts and backend != STATIC and hosts.can_go_on():
            self._supervisor.print_message(f"rankwise: {hosts.lost}; the ranks restart on the other hosts")
        else:
            self._remaining_restarts = 0

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - the supervisor has them
        self._supervisor.stop(AFTER_FAILURE)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002 - the launcher's own
        self._supervisor.stop(AFTER_FAILURE)

    def _exit_barrier(self) -> None:
        """Wait until the launchers of the other hosts have finished too: one of them may need the store of this one.

        Torch's waits in C++, where no signal is heard, for a counter, which any process that reaches the store changes.
        """
        group = self._worker_group
        num_hosts, host = group.group_world_size, group.group_rank
        if group.store is None or host is None or not num_hosts or num_hosts == 1:
            return
        names = [f"rankwise-finished/{number}" for number in range(num_hosts)]
        deadline = time.monotonic() + self._exit_barrier_timeout
        with suppress(RuntimeError):  # the store has ended, with the launcher that had it
            group.store.set(names[host], "")
            while not group.store.check(names) and time.monotonic() < deadline:
                time.sleep(_HOSTS_SECONDS)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Return an empty event. No one reads it, and torch's would ask the name server for the name of this host."""
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def close(self) -> None:
        """Release the memory for the steps of ranks, and the store."""
        self._close_hosts()
        self._steps.close()

    def _meet_hosts(self, group: WorkerGroup) -> None:
        """Watch the other hosts of the next attempt, if there are any."""
        self._close_hosts()
        store, host, num_hosts = group.store, group.group_rank, group.group_world_size
        if store is None or host is None or num_hosts is None or num_hosts == 1:
            return
        # A launch on one host does not need these.
        from rankwise._launch.host_failures import HostFailures  # noqa: PLC0415
        from rankwise._launch.watched_hosts import HostsOfWatchdog  # noqa: PLC0415

        timeout = self._steps.longest_timeout
        watch = getattr(group.spec.rdzv_handler, "watch", None)  # of a terminal, which watches the hosts itself
        watched = (
            watch(timeout)
            if watch is not None
            else HostsOfWatchdog(
                part_of(store, "rankwise-attempt"),
                host=host,
                num_hosts=num_hosts,
                address=str(group.master_addr),
                secret=find_secret(self._launch_spec.environ),
                launch_id=self._supervisor.launch_id,
                timeout=timeout,
            )
        )
        self._hosts = HostFailures(store, host, num_hosts, watched)

    def _close_hosts(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None

    @contextmanager
    def _forward_stop(self) -> Iterator[None]:
        """Stop the ranks when the launcher is stopped."""
        try:
            yield
        except KeyboardInterrupt:
            self._supervisor.stop(after_interrupt(self._launch_spec.grace), explain=True)
            raise
        except SystemExit:
            self._supervisor.stop(after_termination(self._launch_spec.grace), explain=True)
            raise


def run_ranks(
    spec: LaunchSpec, supervisor: Supervisor, rendezvous: RendezvousHandler | None = None
) -> dict[int, LaunchedRank]:
    """Start the ranks of this host, wait until all have ended, and return them.

    After the first failure the others are stopped.

    Args:
        spec: The ranks.
        supervisor: Starts them.
        rendezvous: How the hosts meet; None for what the spec says.

    Raises:
        RankFailedError: A rank failed.
        LaunchError: The ranks could not be started.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended; its cause are the errors that ranks had raised before.
    """
    history = AttemptHistory(most=spec.max_restarts + 1)
    try:
        _run_agent(spec, supervisor, history, rendezvous or _rendezvous_of(spec, supervisor))
    except (KeyboardInterrupt, SystemExit) as stop:
        try:
            raise_failures(
                failed_before(supervisor.ranks, supervisor.stopped_ns), supervisor.world_size, attempts=history.report
            )
        except RankFailedError as failed:
            raise stop from failed
        raise
    if history.lost:
        raise_lost(history.lost, supervisor.ranks, supervisor.world_size, attempts=history.report)
    if history.elsewhere:
        raise RankFailedError(
            describe_failures(history.elsewhere, supervisor.world_size) + history.report.text,
            failures=history.elsewhere,
            earlier=history.report.failures,
        )
    raise_failures(
        supervisor.ranks,
        supervisor.world_size,
        returning=spec.kind is TargetKind.FUNCTION,
        oom_text=history.explain_oom(),
        attempts=history.report,
        consequences=history.consequences,
    )
    return supervisor.ranks


def _rendezvous_of(spec: LaunchSpec, supervisor: Supervisor) -> RendezvousHandler:
    if spec.nodes is None:
        return LoopbackRendezvous(uuid.uuid4().hex, spec.ports)
    needs_secret = SECRET in spec.environ
    waiting = WaitingReport(supervisor.print_message, spec.nodes, spec.command, needs_secret=needs_secret)
    return multi_node_rendezvous(spec.nodes, find_secret(spec.environ), waiting)


def _run_agent(
    spec: LaunchSpec, supervisor: Supervisor, history: AttemptHistory, rendezvous: RendezvousHandler
) -> None:
    """Run the agent until all ranks have ended.

    The agent and its store are local to this function. The error of a rank is raised outside of it, so that its
    traceback, which a caller may keep, does not keep the store open.
    """
    worker_spec = WorkerSpec(
        role=spec.role,
        local_world_size=spec.nproc,
        entrypoint=spec.name,
        rdzv_handler=rendezvous,
        max_restarts=spec.max_restarts,
        local_addr=None if spec.nodes is None else spec.nodes.local_address or None,
        monitor_interval=1e-6,  # the supervisor waits instead, for events
    )
    agent = RankAgent(worker_spec, spec, supervisor, history)
    with _silenced_agent_log():
        try:
            agent.run()
        finally:
            agent.close()
            if not history.lost:  # else the store may be on that host, and asking it cannot be interrupted
                rendezvous.shutdown()


def _failure(worker: Worker, rank: LaunchedRank) -> ProcessFailure:
    return ProcessFailure(
        local_rank=worker.local_rank, pid=rank.pid, exitcode=rank.exitcode or 0, error_file=os.devnull
    )


@contextmanager
def _silenced_agent_log() -> Iterator[None]:
    """Drop the records of the agent's logger: the report of a failure replaces them."""

    def silence(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    logger = logging.getLogger(_AGENT_LOGGER)
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)
