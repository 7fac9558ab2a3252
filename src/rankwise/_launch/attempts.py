"""The attempts of a launch, on one host: the hosts meet, the ranks start and end, and after a failure all start again.

How hosts meet is a rendezvous, in torch's interface: of `_rendezvous.elastic`, of torch itself, or of a terminal that
has started the launchers. The supervisor has the ranks.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousHandler

from rankwise._launch.attempt_history import AttemptHistory, FailedAttempt, reason_to_give_up
from rankwise._launch.grace_period import AFTER_FAILURE, AFTER_LOSS, after_interrupt, after_termination
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.place import Place, agree_on_place
from rankwise._launch.report import describe_failures, failed_before, failures_of, raise_failures, raise_lost
from rankwise._launch.reported_steps import ReportedSteps
from rankwise._launch.spec import LaunchSpec
from rankwise._launch.supervisor import Supervisor
from rankwise._net.job_secret import SECRET, find_secret
from rankwise._rendezvous.elastic import LoopbackRendezvous, multi_node_rendezvous
from rankwise._rendezvous.nodes import STATIC
from rankwise._rendezvous.signed_store import part_of
from rankwise._rendezvous.waiting import WaitingReport
from rankwise._text import ranks_text
from rankwise.errors import LaunchTimeoutError, RankFailedError

if TYPE_CHECKING:
    from rankwise._launch.other_hosts.failures import HostFailures

# How often a launcher whose ranks run asks whether other hosts want to join.
_CHECK_SECONDS: Final = 1.0
# How long the ranks of several hosts have to raise an error that names the one that has failed: those of other hosts
# learn of it from one on its host, and would otherwise name that one, which is stopped.
_RAISE_SECONDS: Final = 0.2
# How often a launcher whose ranks have ended looks at the other hosts.
_HOSTS_SECONDS: Final = 0.1
# How long it waits for those that have not finished, and that may need its store.
_FINISH_SECONDS: Final = 300.0


class End(Enum):
    """How the ranks of an attempt have ended."""

    SUCCEEDED = auto()
    FAILED = auto()
    MEMBERSHIP = auto()  # stopped, since another host wants to join
    TIMED_OUT = auto()  # still running when the time of the launch is over


class Attempts:
    """The attempts of a launch on this host."""

    def __init__(
        self, spec: LaunchSpec, supervisor: Supervisor, rendezvous: RendezvousHandler, history: AttemptHistory
    ) -> None:
        self._spec = spec
        self._supervisor = supervisor
        self._rendezvous = rendezvous
        self._history = history
        self._steps = ReportedSteps(spec.options.nproc if spec.options.max_restarts or spec.options.nodes else 0)
        self._next_attempt = 0
        self._hosts: HostFailures | None = None

    def run(self) -> None:
        """Run attempts until one succeeds, or none may follow."""
        try:
            while True:
                place = agree_on_place(self._rendezvous.next_rendezvous(), self._spec, self._next_attempt)
                self._start(place)
                end = self._watch()
                if end is End.SUCCEEDED:
                    _wait_for_hosts(place)
                    return
                if end is End.TIMED_OUT:
                    raise self._timeout_error()
                if end is End.FAILED and not self._record_failure():
                    return
                self._supervisor.stop(AFTER_FAILURE)
        except RendezvousGracefulExitError:  # the others have finished without this host
            return
        finally:
            self._supervisor.stop(AFTER_FAILURE)
            self._close_hosts()
            self._steps.close()
            if not self._history.lost:  # else the store may be on that host, and asking it cannot be interrupted
                self._rendezvous.shutdown()

    def _start(self, place: Place) -> None:
        self._next_attempt = place.attempt + 1
        requests = {
            place.first_rank + local_rank: self._spec.request(
                place.variables(self._spec, self._rendezvous, local_rank) | self._steps.variables(local_rank)
            )
            for local_rank in range(self._spec.options.nproc)
        }
        if self._spec.options.debugpy is not None and not place.attempt:
            self._supervisor.pause_timeouts()  # to the end: nothing reports when the client of debugpy stops the rank
        self._history.begin_attempt()
        self._close_hosts()
        if place.num_hosts > 1:
            self._hosts = self._other_hosts(place)
        with self._forward_stop():
            if self._hosts is not None:
                self._hosts.meet()
            self._supervisor.start(requests, world_size=place.world_size)

    def _watch(self) -> End:
        """Wait until the ranks have ended, on all hosts if none has failed, and stop what is left of them."""
        with self._forward_stop():
            while not self._is_over_within(min(_CHECK_SECONDS, self._seconds_left())):
                if self._seconds_left() <= 0:
                    return End.TIMED_OUT
                if self._rendezvous.num_nodes_waiting() > 0:
                    return End.MEMBERSHIP
        if not self._has_failed():
            self._supervisor.stop(AFTER_FAILURE, keeps_services=True)
            return End.SUCCEEDED
        if self._hosts is not None:
            self._hosts.announce()
            self._supervisor.wait_for_ends(time.monotonic() + _RAISE_SECONDS)
        self._supervisor.stop(AFTER_LOSS if self._hosts is not None and self._hosts.lost else AFTER_FAILURE)
        return End.FAILED

    def _seconds_left(self) -> float:
        timeout = self._spec.options.timeout
        return math.inf if timeout is None else self._spec.begun + timeout - time.monotonic()

    def _timeout_error(self) -> LaunchTimeoutError:
        """Return the error, with the stacks of the ranks that still run, and let the other hosts know of it."""
        running = self._supervisor.running()
        self._supervisor.stacks.keep(running)
        if self._hosts is not None:
            self._hosts.announce()
        which = f"; {ranks_text(running)} still ran" if running else ""
        return LaunchTimeoutError(
            f"the launch did not end within {self._spec.options.timeout:g} s{which}{self._supervisor.stacks.kept}"
        )

    def _is_over_within(self, seconds: float) -> bool:
        """Wait so long at most, and return whether a rank has failed, or all ranks of all hosts have ended."""
        deadline = time.monotonic() + seconds
        while not self._is_over():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            if self._supervisor.running():
                self._supervisor.wait(left if self._hosts is None else min(left, _HOSTS_SECONDS))
            elif self._hosts is not None:
                self._hosts.finish()
                time.sleep(_HOSTS_SECONDS)
            for rank in self._supervisor.ranks.values():
                rank.update_lingers(self._spec.options.grace)
        return True

    def _is_over(self) -> bool:
        if self._has_failed():
            # A person who debugs a rank may want to see why others have failed.
            return self._supervisor.terminal.holder is None or not self._supervisor.running()
        return not self._supervisor.running() and (self._hosts is None or self._hosts.all_finished)

    def _has_failed(self) -> bool:
        elsewhere = self._hosts is not None and self._hosts.have_failed
        return elsewhere or any(rank.has_failed for rank in self._supervisor.ranks.values())

    def _record_failure(self) -> bool:
        """Record how the attempt has failed, and return whether another one follows."""
        history, supervisor = self._history, self._supervisor
        history.stacks = supervisor.stacks.kept
        failures, step = failures_of(supervisor.ranks), self._steps.take_highest()
        if self._hosts is not None:
            first = supervisor.ranks[failures[0].rank] if failures else None
            was_stopped = first is None or first.was_stopped
            follows = was_stopped or (first is not None and first.result is not None and first.result.consequence)
            elsewhere, step = self._hosts.exchange(failures, consequence=follows, step=step)
            failures = [*elsewhere, *failures] if follows else [*failures, *elsewhere]
            if was_stopped:
                history.elsewhere = failures
            elif not follows:
                history.consequences = elsewhere
            if self._hosts.lost:
                return self._goes_on_without(self._hosts)
        attempt = FailedAttempt(
            failures=tuple(failures),
            world_size=supervisor.world_size,
            step=step,
            oom_text=history.explain_oom(),
        )
        if not history.restarts_left:
            return False
        history.given_up = (
            "SIGKILL did not end all processes of the ranks"
            if supervisor.has_left
            else reason_to_give_up([*history.earlier, attempt])
        )
        if history.given_up:
            return False
        history.earlier.append(attempt)
        history.restarts_left -= 1
        text = describe_failures(attempt.failures, attempt.world_size, oom_text=attempt.oom_text)
        number = len(history.earlier)
        supervisor.print_message(f"rankwise: attempt {number} of {history.most} failed: {text}{history.stacks}")
        return True

    def _goes_on_without(self, hosts: HostFailures) -> bool:
        """Return whether an attempt follows the loss of a host: if the launchers of the others can meet again."""
        self._history.lost = hosts.lost
        backend = STATIC if self._spec.options.nodes is None else self._spec.options.nodes.backend
        if not self._history.restarts_left or backend == STATIC or not hosts.can_go_on():
            return False
        self._history.restarts_left -= 1
        self._supervisor.print_message(f"rankwise: {hosts.lost}; the ranks restart on the other hosts")
        return True

    def _other_hosts(self, place: Place) -> HostFailures:
        """Return the other hosts of an attempt, which are watched from now on."""
        # A launch on one host does not need these.
        from rankwise._launch.other_hosts.failures import HostFailures  # noqa: PLC0415
        from rankwise._launch.other_hosts.watched_hosts import HostsOfWatchdog  # noqa: PLC0415

        timeout = self._steps.longest_timeout
        watch = getattr(self._rendezvous, "watch", None)  # of a terminal, which watches the hosts itself
        watched = (
            watch(timeout)
            if watch is not None
            else HostsOfWatchdog(
                part_of(place.store, "rankwise-attempt"),
                host=place.host,
                num_hosts=place.num_hosts,
                address=place.master_address,
                secret=find_secret(self._spec.environ),
                launch_id=self._supervisor.launch_id,
                timeout=timeout,
            )
        )
        return HostFailures(place.store, place.host, place.num_hosts, watched)

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
            self._supervisor.stop(after_interrupt(self._spec.options.grace), explain=True)
            raise
        except SystemExit:
            self._supervisor.stop(after_termination(self._spec.options.grace), explain=True)
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
    history = AttemptHistory(most=spec.options.max_restarts + 1, restarts_left=spec.options.max_restarts)
    try:
        # The store is referred to by this call alone. The error of a rank is raised outside of it, so that its
        # traceback, which a caller may keep, does not keep the store open.
        Attempts(spec, supervisor, rendezvous or _rendezvous_of(spec, supervisor), history).run()
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
        returning=spec.target.is_function,
        oom_text=history.explain_oom(),
        attempts=history.report,
        consequences=history.consequences,
    )
    return supervisor.ranks


def _rendezvous_of(spec: LaunchSpec, supervisor: Supervisor) -> RendezvousHandler:
    if spec.options.nodes is None:
        return LoopbackRendezvous(uuid.uuid4().hex, spec.options.ports)
    needs_secret = SECRET in spec.environ
    waiting = WaitingReport(supervisor.print_message, spec.options.nodes, spec.command, needs_secret=needs_secret)
    return multi_node_rendezvous(spec.options.nodes, find_secret(spec.environ), waiting)


def _wait_for_hosts(place: Place) -> None:
    """Wait until the launchers of the other hosts have finished too: one of them may need the store of this one."""
    if place.num_hosts == 1:
        return
    names = [f"rankwise-finished/{host}" for host in range(place.num_hosts)]
    deadline = time.monotonic() + _FINISH_SECONDS
    with suppress(RuntimeError):  # the store has ended, with the launcher that had it
        place.store.set(names[place.host], "")
        while not place.store.check(names) and time.monotonic() < deadline:
            time.sleep(_HOSTS_SECONDS)
