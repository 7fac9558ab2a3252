"""A launch on several hosts from one terminal: a launcher on each, over ssh or srun, and one report.

Decided here: when the hosts meet, when one is lost, what the end of one means for the others, and how long they may
take to end. Which hosts meet is decided in `rounds`, and which error is reported in `report`.
"""

from __future__ import annotations

import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from rankwise._launch.hosts.connection import HostConnection, HostState
from rankwise._launch.hosts.launcher import HostJob
from rankwise._launch.hosts.report import HostProblem, error_of, stopped_error
from rankwise._launch.hosts.rounds import StoreValues, can_go_on, meeting_address, next_round, waiting_text
from rankwise._launch.hosts.ssh_command import HostCommand
from rankwise._launch.interpreter import working_directory
from rankwise._launch.other_hosts.messages import (
    MEET,
    Alive,
    Deliver,
    Hello,
    Hold,
    HostEnded,
    HostLost,
    Meeting,
    Printed,
    Reply,
    Request,
    Start,
    Told,
    Watching,
)
from rankwise._launch.other_hosts.watchdog import BEAT_SECONDS, END_SECONDS, UNKNOWN_SECONDS, Heartbeats
from rankwise._launch.output.console import Console, RankOutput
from rankwise._launch.scripts import Terminated
from rankwise._launch.spec import sent_environ
from rankwise._net.job_secret import SECRET, new_secret
from rankwise._net.polling import EventLoop
from rankwise._rendezvous.nodes import TERMINAL, Nodes
from rankwise.errors import InvalidArgumentError, LaunchError, RankFailedError

# How long a host may take from the start of ssh until its launcher has imported torch.
_START_SECONDS: Final = 300.0
# How long the others may take beyond the grace period of ranks after one has failed: they exchange what they know.
_AFTER_FAILURE_SECONDS: Final = 35.0
# How long a launcher may take beyond the grace period of its ranks, and its watchdog to kill all of them.
_END_SECONDS: Final = 15.0
_GRACE_AFTER_TERMINATION: Final = 30.0
# How long nothing is said about hosts that start. Importing torch takes some seconds.
_SILENT_SECONDS: Final = 10.0


def nodes_of(commands: Sequence[HostCommand], *, least: int = 0, most: int = 0, address: str = "") -> Nodes:
    """Return the hosts of a launch, with a run id of their own.

    Args:
        commands: How their watchdogs are started, in the order of their ranks.
        least, most: How many of them have ranks; 0 for all. The others are spares.
        address: The address of the first host for the others; "" for the one that ssh has reached it at.

    Raises:
        InvalidArgumentError: They are too few.
    """
    names = [command.name for command in commands]
    if most > len(names):
        raise InvalidArgumentError(f"nnodes={most} is above the number of hosts, {len(names)}: {', '.join(names)}")
    number = most or len(names)
    run_id = uuid.uuid4().hex
    return Nodes(num_nodes=number, min_nodes=least or number, address=address, backend=TERMINAL, run_id=run_id)


class HostsLaunch:
    """A launch on several hosts."""

    def __init__(self, job: HostJob, commands: Sequence[HostCommand], console: Console) -> None:
        """Prepare.

        Args:
            job: The launch of each host.
            commands: How the watchdogs of the hosts are started.
            console: Shows the output.
        """
        self._options, self._nodes = job.options, job.nodes
        self._commands = commands
        self._console = console
        self._output = HostOutput(console)
        self._loop = EventLoop()
        self._hosts: list[HostConnection] = []
        self._store = StoreValues()
        self._beats = Heartbeats(time.monotonic())
        self._beat_at = time.monotonic()
        self._num_rounds = 0
        self._told = ""
        self._problems: list[HostProblem] = []
        # The hosts that this round has lost: the launch may go on without them, or end with another error.
        self._lost: list[HostProblem] = []
        self._stop: BaseException | None = None
        # The secret goes through the streams of ssh alone.
        environ = {SECRET: new_secret(), **sent_environ()}
        self._start = Start(environ=environ, folder=working_directory(), job=pickle.dumps(job))
        self._wakeup, self._waker = socket.socketpair()

    def run(self) -> dict[int, bytes]:
        """Run to the end on all hosts, and return the results of a function, pickled, by rank.

        Raises:
            LaunchError: A host could not be used, or is lost.
            RankFailedError: A rank has failed.
            KeyboardInterrupt, Terminated: This process was stopped; the cause are the errors of ranks before.
        """
        try:
            self._start_hosts()
            while not all(host.is_over for host in self._hosts):
                try:
                    self._run_once()
                except (KeyboardInterrupt, Terminated) as stop:
                    self._stop_all(stop)
        finally:
            self._close()
        if self._stop is not None:
            raise self._stop from stopped_error(self._problems)
        if self._problems:
            error, cause = error_of([*self._lost, *self._problems])
            raise error from cause
        return {rank: value for host in self._hosts if host.ended for rank, value in host.ended.values.items()}

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for host in self._hosts:
            if host.state is HostState.RUNNING:
                host.send(Deliver(signum))

    def suspend(self) -> None:
        """Stop all ranks until `resume`, and let the hosts wait for this process."""
        self._deliver(signal.SIGTSTP)

    def resume(self) -> None:
        """Continue all ranks."""
        self._deliver(signal.SIGCONT)

    def request_stacks(self) -> None:
        """Let each host print the stacks of its ranks."""
        self.signal_all(signal.SIGQUIT)

    def _deliver(self, signum: signal.Signals) -> None:
        for host in self._hosts:
            if host.hello is not None:
                host.send(Deliver(signum))

    def _start_hosts(self) -> None:
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        self._loop.register(self._wakeup, self._release_output)
        self._console.on_writable = self._wake_up
        for command in self._commands:
            connection = HostConnection(
                command,
                self._loop,
                on_message=self._receive,
                on_text=partial(self._output.show_text, command.name),
            )
            self._hosts.append(connection)

    def _run_once(self) -> None:
        if not self._loop.run_once(BEAT_SECONDS):
            self._output.flush()
        now = time.monotonic()
        self._look_for_losses(now)
        self._show_waiting(now)
        self._begin_round()

    def _look_for_losses(self, now: float) -> None:
        """Tell the hosts that this process is there, and look for those that do not tell, or do not start, or end."""
        told = [host.seconds for host in self._hosts if host.seconds is not None and host.state is HostState.RUNNING]
        self._beats.seconds = min(told, default=UNKNOWN_SECONDS)
        silent = self._beats.silent(now)
        is_beat = now >= self._beat_at
        if is_beat:
            self._beat_at = now + BEAT_SECONDS
        for number, host in enumerate(self._hosts):
            if host.is_over:
                continue
            if is_beat and host.hello is not None:
                host.send(Alive())
            if host.is_starting and now - host.since > _START_SECONDS:
                host.give_up(f"cannot be used: it has not started within {_START_SECONDS:g} s")
            elif number in silent:
                host.give_up(f"is lost: nothing was heard of it for {silent[number]:.0f} s")
            elif now > host.deadline:
                self._end_late(host, now)

    def _end_late(self, host: HostConnection, now: float) -> None:
        """Hang up on a host that has not ended in time, and kill its ssh if that does not end it."""
        host.deadline = now + _END_SECONDS
        if host.is_hung_up:
            host.kill()
        else:
            self._console.print_message(f"rankwise: the launcher of host {host.name} did not end, and is killed")
            host.is_released = True
            host.hang_up()

    def _show_waiting(self, now: float) -> None:
        """Tell which hosts the others wait for, after some seconds, and whenever that changes."""
        if self._num_rounds or self._stop is not None or now - self._hosts[0].since < _SILENT_SECONDS:
            return
        text = waiting_text(self._hosts)
        if text and text != self._told:
            self._told = text
            self._console.print_message(f"rankwise: {text}")

    def _receive(self, host: HostConnection, message: Any) -> None:  # noqa: ANN401 - any message; None at the end
        if message is None:
            self._end(host)
            return
        self._beats.note(self._hosts.index(host), time.monotonic())
        if isinstance(message, Printed):
            self._output.show(host.hostname, message)
            if self._output.is_full and not host.is_held:
                host.is_held = True
                host.send(Hold(is_held=True))
        elif isinstance(message, Told):
            self._output.tell(host.name, message.text)
        elif isinstance(message, Hello):
            # Not before: something else might print what it reads, as `cat` does, and the secret with it.
            host.send(self._start)
        elif isinstance(message, Request):
            self._answer(host, message)
        elif isinstance(message, Watching):
            host.seconds = message.seconds or host.seconds
            self._beats.has_failed |= message.failed
        elif isinstance(message, HostEnded):
            self._record_end(host, message)

    def _end(self, host: HostConnection) -> None:
        self._beats.forget(self._hosts.index(host))
        self._output.end(host.hostname)
        if host.lost is not None:
            self._lose(host, host.lost)

    def _answer(self, host: HostConnection, request: Request) -> None:
        if request.operation == MEET:
            host.state = HostState.READY
            host.request = request.number
            host.deadline = float("inf")
            host.seconds = None
            if self._problems or self._stop is not None:  # it does not know yet that there is no other attempt
                self._release()
        else:
            host.send(Reply(request.number, self._store.apply(request.operation, *request.arguments)))

    def _begin_round(self) -> None:
        """Let the hosts meet, or release the spares after the last round."""
        if self._problems or self._stop is not None:
            return
        if any(host.ended for host in self._hosts):
            if not any(host.state is HostState.RUNNING for host in self._hosts):
                self._release()
            return
        chosen = next_round(self._hosts, least=self._nodes.min_nodes, most=self._nodes.num_nodes)
        if not chosen:
            return
        self._num_rounds += 1
        self._lost = []
        self._beats.has_failed = False
        address = self._nodes.address or meeting_address(chosen)
        one_host = all(host.command.is_local for host in chosen)
        for node_rank, host in enumerate(chosen):
            host.state = HostState.RUNNING
            host.round = self._num_rounds
            meeting = Meeting(
                number=self._num_rounds,
                node_rank=node_rank,
                num_nodes=len(chosen),
                address=address,
                one_host=one_host,
            )
            host.send(Reply(host.request, meeting))

    def _record_end(self, host: HostConnection, ended: HostEnded) -> None:
        host.deadline = time.monotonic() + _END_SECONDS
        error = ended.error
        if error is None and ended.stopped and self._stop is None and not self._problems:
            error = LaunchError(host.command.explain_stop(ended.stopped))
        if error is not None and not isinstance(error, RankFailedError):  # of a rank, the others know
            self._tell_lost(host, f"host {host.name} has ended: {error}")
        errors = [] if error is None else [error]
        for problem in [*errors, *map(LaunchError, ended.lost)]:
            self._problems.append(HostProblem(host=host.name, error=problem, ended=ended))
        if errors:
            self._end_others(_AFTER_FAILURE_SECONDS + self._options.grace)

    def _lose(self, host: HostConnection, why: LaunchError) -> None:
        """Go on without a host, or end the others."""
        if host.is_released or self._stop is not None:
            return
        self._tell_lost(host, str(why))
        problem = HostProblem(host=host.name, error=why)
        may_restart = self._options.max_restarts > 0 or not self._num_rounds
        if not self._problems and may_restart and can_go_on(self._hosts, least=self._nodes.min_nodes):
            self._console.print_message(f"rankwise: {why}\nrankwise: the launch goes on without host {host.name}")
            self._lost += [problem] if host.round == self._num_rounds else []
        else:
            self._problems.append(problem)
            self._release()
        for other in self._hosts:
            if other.state is HostState.RUNNING and other.round == host.round:
                other.deadline = min(other.deadline, time.monotonic() + END_SECONDS)

    def _tell_lost(self, host: HostConnection, why: str) -> None:
        """Tell the other hosts of its meeting that a host has no ranks any more."""
        for other in self._hosts:
            if other.state is HostState.RUNNING and other.round == host.round and other is not host:
                other.send(HostLost(host.round, why))

    def _end_others(self, seconds: float) -> None:
        """End the hosts that have no ranks now, and the others after some time: they end by themselves."""
        self._release()
        for host in self._hosts:
            host.deadline = min(host.deadline, time.monotonic() + seconds)

    def _stop_all(self, stop: BaseException) -> None:
        """Stop the ranks of all hosts, as Ctrl-C or SIGTERM to this process does on one host."""
        self._stop = self._stop or stop
        self.signal_all(signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        self._end_others(max(self._options.grace, _GRACE_AFTER_TERMINATION) + _END_SECONDS)

    def _release(self) -> None:
        """Hang up on the hosts that have no ranks: their watchdogs end what has been started there."""
        for host in self._hosts:
            if host.state is not HostState.RUNNING and not host.is_over:
                host.is_released = True
                host.deadline = time.monotonic() + _END_SECONDS
                host.hang_up()

    def _wake_up(self) -> None:
        """Let the event loop ask for more output. The thread of a writer calls this."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _release_output(self) -> None:
        self._wakeup.recv(1 << 12)
        for host in self._hosts:
            if host.is_held and not self._output.is_full:
                host.is_held = False
                host.send(Hold(is_held=False))

    def _close(self) -> None:
        self._console.on_writable = lambda: None
        for host in self._hosts:
            host.hang_up()
        for host in self._hosts:
            host.close()
        self._loop.close()
        self._wakeup.close()
        self._waker.close()


class HostOutput:
    """The output of the hosts of a launch, on the terminal's own streams: that of ranks, and messages."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._outputs: dict[tuple[str, int, bool], RankOutput] = {}
        self._told: dict[str, set[str]] = {}
        self._text: dict[str, bytes] = {}

    @property
    def is_full(self) -> bool:
        """So much is not shown yet that nothing more should be sent for now."""
        return any(output.is_full for output in self._outputs.values())

    def show(self, host: str, printed: Printed) -> None:
        """Show the output of a rank."""
        key = host, printed.rank, printed.is_error
        if key not in self._outputs:
            stream = sys.stderr if printed.is_error else sys.stdout
            self._outputs[key] = self._console.open(printed.rank, stream, local_rank=printed.local_rank, host=host)
        self._outputs[key].write(printed.text)

    def tell(self, host: str, text: str) -> None:
        """Show a message of a launcher, unless that of another host has sent the same."""
        hosts = self._told.setdefault(text, set())
        if not hosts or host in hosts:  # its first, or the same event again
            hosts.clear()
            self._console.print_message(text)
        hosts.add(host)

    def show_text(self, host: str, text: bytes) -> None:
        """Show what a process that is no rank has printed on a host, by whole lines."""
        whole, newline, rest = (self._text.pop(host, b"") + text).rpartition(b"\n")
        if rest:
            self._text[host] = rest
        if newline:
            self._console.print_message(whole.decode(errors="replace"))

    def flush(self) -> None:
        """Show lines that are not whole yet, such as a prompt."""
        for output in self._outputs.values():
            output.flush()

    def end(self, host: str) -> None:
        """Show the rest of what a host has sent."""
        for key in [key for key in self._outputs if key[0] == host]:
            self._outputs.pop(key).flush(last=True)
        if rest := self._text.pop(host, b""):
            self._console.print_message(rest.decode(errors="replace"))
