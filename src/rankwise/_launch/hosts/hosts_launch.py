"""A launch on several hosts from one terminal: an agent on each, over ssh, and one report.

Decided here: when the hosts meet, what the end of one means for the others, and how long they may take to end. Which
hosts meet is decided in `host_rounds`, and which error is reported in `host_report`.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from rankwise._launch.console import Console
from rankwise._launch.hosts.host_connection import HostConnection, HostState
from rankwise._launch.hosts.host_guard import ALIVE_SECONDS
from rankwise._launch.hosts.host_messages import (
    Alive,
    Deliver,
    Hello,
    HostEnded,
    HostJob,
    HostStart,
    Meet,
    Printed,
    Ready,
    Serve,
    Serving,
    Told,
)
from rankwise._launch.hosts.host_output import HostOutput
from rankwise._launch.hosts.host_report import HostProblem, error_of, stopped_error
from rankwise._launch.hosts.host_rounds import can_go_on, meeting_address, next_round, waiting_text
from rankwise._launch.hosts.ssh_command import HostCommand
from rankwise._launch.interpreter import working_directory
from rankwise._launch.scripts import Terminated
from rankwise._launch.spec import sent_environ
from rankwise._net.job_secret import SECRET, new_secret
from rankwise._net.polling import EventLoop
from rankwise.errors import LaunchError

# How long a host may take from the start of ssh until its agent has imported torch.
_START_SECONDS: Final = 300.0
# How long the others may take to end by themselves after one has failed: they exchange what they know.
_AFTER_FAILURE_SECONDS: Final = 20.0
# And after one is lost: a rank that waits for it may take as long as ranks wait for each other.
_AFTER_LOSS_SECONDS: Final = 5.0
# How long an agent may take beyond the grace period of its ranks, and its guard to kill all of them.
_END_SECONDS: Final = 15.0
_GRACE_AFTER_TERMINATION: Final = 30.0
_IDLE_SECONDS: Final = 0.5
# How long nothing is said about hosts that start. Importing torch takes some seconds.
_SILENT_SECONDS: Final = 10.0


class HostsLaunch:
    """A launch on several hosts."""

    def __init__(
        self, job: HostJob, commands: Sequence[HostCommand], *, console: Console, least: int, most: int, address: str
    ) -> None:
        """Prepare.

        Args:
            job: The job of each host.
            commands: How the guards of the hosts are started, in the order of the hosts.
            console: Shows the output.
            least, most: How many hosts have ranks; the others are spares.
            address: The address of the first host for the others; "" to find it.
        """
        self._job = job
        self._commands = commands
        self._console = console
        self._output = HostOutput(console)
        self._least, self._most = least, most
        self._address = address
        self._loop = EventLoop()
        self._hosts: list[HostConnection] = []
        self._server: HostConnection | None = None
        self._num_rounds = 0
        self._told = ""
        self._problems: list[HostProblem] = []
        self._stop: BaseException | None = None
        # What is done next to hosts that do not end, and when.
        self._steps: list[tuple[float, str]] = []
        self._alive_at = time.monotonic() + ALIVE_SECONDS
        # The secret goes through the streams of ssh alone.
        self._start = HostStart(environ={SECRET: new_secret(), **sent_environ()}, folder=working_directory())
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
            error, cause = error_of(self._problems)
            raise error from cause
        return {rank: value for host in self._hosts if host.ended for rank, value in host.ended.values.items()}

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all ranks."""
        for host in self._hosts:
            if host.state is HostState.RUNNING:
                host.send(Deliver(signum))

    def suspend(self) -> None:
        """Stop all ranks until `resume`."""
        self.signal_all(signal.SIGTSTP)

    def resume(self) -> None:
        """Continue all ranks."""
        self.signal_all(signal.SIGCONT)

    def request_stacks(self) -> None:
        """Let each host print the stacks of its ranks."""
        self.signal_all(signal.SIGQUIT)

    def _start_hosts(self) -> None:
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        self._loop.register(self._wakeup, self._resume_reading)
        self._console.on_writable = self._wake_up
        for command in self._commands:
            connection = HostConnection(
                command,
                self._loop,
                on_message=self._receive,
                on_text=partial(self._output.show_text, command.name),
                is_full=lambda: self._output.is_full,
            )
            self._hosts.append(connection)

    def _run_once(self) -> None:
        if not self._loop.run_once(_IDLE_SECONDS):
            self._output.flush()
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + ALIVE_SECONDS
            for host in self._hosts:
                if host.hello is not None:
                    host.send(Alive())
        for host in self._hosts:
            if host.is_starting and now - host.since > _START_SECONDS:
                host.give_up(f"it has not started within {_START_SECONDS:g} s")
        self._show_waiting(now)
        self._begin_round()
        self._take_steps(now)

    def _show_waiting(self, now: float) -> None:
        """Tell which hosts the others wait for, after some seconds, and whenever that changes."""
        if self._num_rounds or self._stop is not None or now - self._hosts[0].since < _SILENT_SECONDS:
            return
        text = waiting_text(self._hosts)
        if text and text != self._told:
            self._told = text
            self._console.print_message(f"rankwise: {text}")

    def _receive(self, host: HostConnection, message: Any) -> None:  # noqa: ANN401 - any message; None at the end
        if isinstance(message, Printed):
            self._output.show(host.hostname, message)
        elif isinstance(message, Told):
            self._output.tell(host.name, message.text)
        elif isinstance(message, Hello):
            # Not before: something else might print what it reads, as `cat` does, and the secret with it.
            host.send(self._start)
            host.send(self._job)
        elif isinstance(message, Ready):
            host.state = HostState.READY
        elif isinstance(message, Serving):
            self._meet(host, message.port)
        elif isinstance(message, HostEnded):
            self._record_end(host, message)
        elif message is None:
            self._output.end(host.hostname)
            if host.lost is not None:
                self._lose(host, host.lost)

    def _begin_round(self) -> None:
        """Let the hosts meet, or release the spares after the last round."""
        if self._problems or self._stop is not None:
            return
        if any(host.ended for host in self._hosts):
            if not any(host.state is HostState.RUNNING for host in self._hosts):
                self._release()
            return
        chosen = next_round(self._hosts, least=self._least, most=self._most)
        if chosen and self._server is None:
            self._server = chosen[0]
            self._server.send(Serve(one_host=all(host.command.is_local for host in chosen)))

    def _meet(self, server: HostConnection, port: int) -> None:
        chosen = next_round(self._hosts, least=self._least, most=self._most)
        self._server = None
        if not chosen or chosen[0] is not server:  # a host was lost meanwhile
            return
        self._num_rounds += 1
        address = self._address or meeting_address(chosen)
        for node_rank, host in enumerate(chosen):
            host.state = HostState.RUNNING
            host.send(Meet(node_rank=node_rank, num_nodes=len(chosen), address=address, port=port))

    def _record_end(self, host: HostConnection, ended: HostEnded) -> None:
        error = ended.error
        if error is None and ended.stopped and self._stop is None and not self._problems:
            error = LaunchError(host.command.explain_stop(ended.stopped))
        if error is not None:
            self._problems.append(HostProblem(host=host.name, error=error, ended=ended))
            self._end_others(_AFTER_FAILURE_SECONDS)
        for text in ended.lost:  # of its log files
            error = LaunchError(text)
            self._problems.append(HostProblem(host=host.name, error=error, ended=ended))

    def _lose(self, host: HostConnection, why: LaunchError) -> None:
        """Go on without a host, or end the others."""
        if host is self._server:
            self._server = None
        if host.is_released or self._stop is not None:
            return
        may_restart = self._job.spec.max_restarts > 0 or not self._num_rounds
        if not self._problems and may_restart and can_go_on(self._hosts, least=self._least):
            self._console.print_message(f"rankwise: {why}\nrankwise: the launch goes on without host {host.name}")
            return
        self._problems.append(HostProblem(host=host.name, error=why))
        self._end_others(_AFTER_LOSS_SECONDS)

    def _end_others(self, seconds: float) -> None:
        """End the hosts that have no ranks; the agents of the others end by themselves, or are interrupted."""
        self._release()
        if not self._steps:
            now = time.monotonic()
            killed = now + seconds + self._job.spec.grace + _END_SECONDS
            self._steps = [(now + seconds, "interrupt"), (killed, "hang up"), (killed + _END_SECONDS, "kill")]

    def _stop_all(self, stop: BaseException) -> None:
        """Stop the ranks of all hosts, as Ctrl-C or SIGTERM to this process does on one host."""
        self._stop = self._stop or stop
        self._release()
        self.signal_all(signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        killed = time.monotonic() + max(self._job.spec.grace, _GRACE_AFTER_TERMINATION) + _END_SECONDS
        self._steps = [(killed, "hang up"), (killed + _END_SECONDS, "kill")]

    def _release(self) -> None:
        """Hang up on the hosts that have no ranks: their guards end what has been started there."""
        for host in self._hosts:
            if host.state is not HostState.RUNNING and not host.is_over:
                host.is_released = True
                host.hang_up()

    def _take_steps(self, now: float) -> None:
        while self._steps and now >= self._steps[0][0]:
            _, what = self._steps.pop(0)
            for host in self._hosts:
                if what == "interrupt":
                    host.send(Deliver(signal.SIGINT))
                elif what == "hang up":
                    host.hang_up()
                elif not host.is_over:
                    host.kill()

    def _wake_up(self) -> None:
        """Let the event loop resume reading. The thread of a writer calls this."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _resume_reading(self) -> None:
        self._wakeup.recv(1 << 12)
        for host in self._hosts:
            host.resume()

    def _close(self) -> None:
        self._console.on_writable = lambda: None
        for host in self._hosts:
            host.hang_up()
        for host in self._hosts:
            host.close()
        self._loop.close()
        self._wakeup.close()
        self._waker.close()
