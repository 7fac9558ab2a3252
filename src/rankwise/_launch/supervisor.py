"""The supervisor of the ranks of this host: it starts them, shows their output, watches for their ends, and stops them.

One event loop, in the launcher's main thread, waits for the fork server, the ranks and their output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.ipc import Leaving, StartRequest, TargetKind
from rankwise._launch.grace_period import StopSignals
from rankwise._launch.interrupts import Interrupts
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.output.console import SECONDS_TO_READ, SECONDS_TO_READ_AFTER_STOP, Console
from rankwise._launch.output.pipes import OutputPipes
from rankwise._launch.rank_process import RankProcesses
from rankwise._launch.rank_stacks import RankStacks
from rankwise._launch.reaper import become_subreaper, wait_of
from rankwise._launch.terminal import Terminal
from rankwise._net.pausable_timeouts import TimeoutPause
from rankwise._net.polling import EventLoop
from rankwise._text import ranks_text

log = logging.getLogger(__name__)

# How long to wait for the last output of ranks that have ended: it is in the pipes already.
_DRAIN_SECONDS: Final = 0.2
# How long ranks may print nothing after their start before it is looked for what they import.
_QUIET_SECONDS: Final = 4.0
# How long a user who has stopped the launcher waits before a message explains the wait.
_SILENT_SECONDS: Final = 1.0
# How long after SIGKILL ranks are waited for. Those in an uninterruptible wait stay until that is over.
_KILL_SECONDS: Final = 2.0


class Supervisor:
    """The ranks of this host and the fork server. A context manager: at its end no process of either is left.

    Attributes:
        ranks: The ranks, by their global rank.
        world_size: The number of ranks on all hosts; 0 before the first start.
        stacks: The stacks of the ranks, on request, and those of ranks that are killed.
        stopped_ns: When `stop` was called first, on the host's monotonic clock; 0 if it was not.
    """

    def __init__(self, start_server: Callable[[], ForkServer], *, console: Console, hang_dir: str = "") -> None:
        """Start the fork server.

        Args:
            start_server: Returns the fork server.
            console: Shows the output of ranks.
            hang_dir: The folder for files of the stacks of ranks; "" for none.
        """
        if message := console.logs.create():
            console.print_message(message)
        self._console = console
        self._hurries = False
        self._left_with: set[str] = set()
        self.stopped_ns = 0
        self._next_look = float("inf")
        self.world_size = 0
        self._server = start_server()  # first: where it raises, nothing is open yet
        self._loop = EventLoop()
        self._pipes = OutputPipes(self._loop, console)
        if self._server.owns_descendants:
            become_subreaper()
        self._pause = TimeoutPause()
        self._is_suspended = False
        self._processes = RankProcesses[LaunchedRank](self._server, self._loop)
        self.ranks = self._processes.ranks
        self.stacks = RankStacks(self.ranks, self._loop, self.print_message, hang_dir)
        self.terminal = Terminal(self.ranks, self._pipes, console, self._pause)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(patiently=kind is None or issubclass(kind, Exception))

    def obey(self, interrupts: Interrupts) -> None:
        """Raise KeyboardInterrupt in `wait` when another thread says so."""
        self._loop.register(interrupts.fileno(), interrupts.take)

    def start(self, requests: Mapping[int, StartRequest], *, world_size: int) -> None:
        """Start ranks, and wait until their processes exist.

        Raises:
            LaunchError: This host has no resources for them, or the fork server could not start.
        """
        self._release_ranks()
        self._processes.clear()
        self._hurries = False
        self.stacks.kept = ""
        self._left_with.clear()
        self.stopped_ns = 0
        self.world_size = world_size
        self._begin_logs(requests)
        for local_rank, (rank, request) in enumerate(requests.items()):
            self._start(rank, local_rank, request)
        while any(not rank.pid for rank in self.ranks.values()):
            self.wait(1.0)
            for text in self._server.preloading.messages():
                self.print_message(text)
        self._console.clear_status()
        if self._console.has_status:
            self._next_look = time.monotonic() + _QUIET_SECONDS

    def wait(self, seconds: float) -> None:
        """Wait until an event happens, for that many seconds at most, and process it.

        Raises:
            LaunchError: The fork server has ended.
        """
        if self._next_look < time.monotonic():
            self._show_imports()
        # Output that has stopped in the middle of a line may be a prompt.
        try:
            has_event = self._loop.run_once(min(seconds, self.terminal.update()))
        except KeyboardInterrupt:
            if not self.terminal.is_used:
                raise
            self._processes.signal(self.terminal.holder or 0, signal.SIGINT)
            return
        if not has_event and not self._pipes.any_paused:
            self._flush_output()

    def signal_all(self, signum: signal.Signals, *, to_groups: bool = False) -> None:
        """Send a signal to all ranks; with `to_groups`, also to the processes that they have started."""
        for rank in self.running():
            self._processes.signal(rank, signum, to_group=to_groups or self.ranks[rank].is_program)

    def suspend(self) -> None:
        """Stop the ranks until `resume`, and their waiting clocks."""
        self.signal_all(signal.SIGSTOP, to_groups=True)
        if not self._is_suspended:
            self._is_suspended = True
            self._pause.begin()

    def resume(self) -> None:
        """Send SIGCONT to the ranks."""
        if self._is_suspended:
            self._is_suspended = False
            self._pause.end()
        self.signal_all(signal.SIGCONT, to_groups=True)

    def request_stacks(self) -> None:
        """Let the stacks of all ranks be printed: for a handler of signals."""
        self.stacks.request()

    def pause_timeouts(self) -> None:
        """Pause the timeouts of the ranks, to the end."""
        self._pause.begin()

    def print_message(self, text: str) -> None:
        """Show a message of the launcher."""
        self._console.print_message(text)

    def running(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return self._processes.running()

    def stop(self, signals: StopSignals, *, explain: bool = False, keeps_services: bool = False) -> None:
        """End all ranks and their descendants, and show the rest of their output.

        A second call while the first one waits, as after a second Ctrl-C, does not wait any more.

        Args:
            signals: The signals for the ranks, with their grace periods.
            explain: Print for which ranks this waits.
            keeps_services: What the ranks have started in sessions of its own, to outlive them, is left.
        """
        if self._processes.has_swept or not self._server.preloading.is_over:  # there is no rank yet
            return
        self.terminal.close()
        gentle = () if self._hurries else signals
        self._hurries = True
        self.stopped_ns = self.stopped_ns or time.monotonic_ns()
        for signum, grace in (*gentle, (signal.SIGKILL, _KILL_SECONDS)):
            if gentle and (signum == signal.SIGKILL or any(rank.has_timed_out for rank in self.ranks.values())):
                self.stacks.keep(self.running())
            for rank in self.running():
                self.ranks[rank].signals.add(signum)
                # What a rank leaves is killed in the end, and in an order that lets shared memory be removed.
                to_group = self.ranks[rank].is_program and signum != signal.SIGKILL
                self._processes.signal(rank, signum, to_group=to_group)
            deadline = time.monotonic() + grace
            if explain and signum != signal.SIGKILL and grace > _SILENT_SECONDS:
                self.wait_for_ends(deadline - grace + _SILENT_SECONDS)
                self._explain_wait(grace)
            self.wait_for_ends(deadline)
        if explain and self.stacks.kept:
            self.print_message(f"rankwise: {self.stacks.kept.lstrip()}")
        self._processes.sweep(keeps_services=keeps_services)
        for pid in self._processes.left:
            self._explain_left(pid)
        self._pipes.read_all()
        self._wait_until(lambda: not self._pipes.any_open, time.monotonic() + _DRAIN_SECONDS)

    def wait_for_ends(self, deadline: float) -> None:
        """Wait until all ranks have ended, or until a time on the monotonic clock."""
        self._wait_until(lambda: not self.running(), deadline)

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def _explain_wait(self, grace: float) -> None:
        if running := self.running():
            ranks = ranks_text(running)
            self.print_message(f"rankwise: {ranks} may take {grace:g} s to end; Ctrl-C ends them now")

    @property
    def launch_id(self) -> str:
        """The value of the variable `reaper.LAUNCH_ID` of all processes of this launch."""
        return self._server.launch_id

    @property
    def has_left(self) -> bool:
        """There are processes that SIGKILL did not end."""
        return bool(self._processes.left)

    def _explain_left(self, pid: int) -> None:
        of_rank = [f"rank {number}, process {pid}," for number, rank in self.ranks.items() if rank.pid == pid]
        who = of_rank[0] if of_rank else f"process {pid}, which a rank has started,"
        why = wait_of(pid)
        self.print_message(
            f"rankwise: {who} is left: it did not end after SIGKILL{f' ({why})' if why else ''}; a process in state D "
            "ends when a disk, a network file system or a driver has answered"
        )

    def close(self, *, patiently: bool = True) -> None:
        """Kill everything at once, the fork server included.

        Args:
            patiently: Give a slow reader of the output the time to read it.
        """
        self._processes.close()
        self.terminal.close()
        self._release_ranks()
        self._pause.close()
        self.stacks.close()
        self._loop.close()
        if not self._server.owns_descendants:  # else a command, which drains the console after its last message
            lost = self._console.drain(SECONDS_TO_READ if patiently else SECONDS_TO_READ_AFTER_STOP)
            for text in lost:
                log.warning(text)
        self._pipes.close()

    def _release_ranks(self) -> None:
        """Close the pipes of the ranks, which have ended, and their connections."""
        self._pipes.close_all()
        self._processes.disconnect()
        for rank in self.ranks.values():
            if rank.crash and not rank.has_crashed:
                rank.errors.write(rank.crash)  # of a child of the rank, such as a worker of a data loader
                rank.crash = b""
            rank.output.flush(last=True)
            rank.errors.flush(last=True)
            rank.write_end_to_log()

    def _flush_output(self) -> None:
        for rank in self.ranks.values():
            rank.output.flush()
            rank.errors.flush()

    def _show_leaving(self, message: Leaving) -> None:
        """Show that a rank leaves with an error; the error that other ranks have too, once."""
        if message.error not in self._left_with:
            self._left_with.add(message.error)
            self.print_message(f"rankwise: {message.text}")

    def _show_imports(self) -> None:
        """Show on a terminal what ranks import that have not printed anything yet; with that, their start is over."""
        imports = "" if self._console.screen.has_output else self.stacks.imports()
        self._next_look = time.monotonic() + _QUIET_SECONDS if imports else float("inf")
        if imports:
            self._console.show_status(f"rankwise: importing ({imports})")
        else:
            self._console.clear_status()

    def _begin_logs(self, requests: Mapping[int, StartRequest]) -> None:
        for text in self._console.logs.close(SECONDS_TO_READ):  # of the attempt before
            self.print_message(f"rankwise: {text}")
        self._console.logs.begin_attempt(next(iter(requests.values())).environ)

    def _start(self, number: int, local_rank: int, request: StartRequest) -> None:
        variables = self._console.logs.variables(local_rank)
        with contextlib.ExitStack() as stack:
            stdout, output = self._pipes.open(number, sys.stdout, 1, local_rank)
            stack.callback(os.close, stdout)
            stderr, errors = self._pipes.open(number, sys.stderr, 2, local_rank)
            stack.callback(os.close, stderr)
            rank = LaunchedRank(
                output=output,
                errors=errors,
                on_terminal_request=lambda wanted: self.terminal.request(number, wanted=wanted),
                on_leaving=self._show_leaving,
                is_program=request.target.kind is TargetKind.PROGRAM,
            )
            crashes = self._pipes.pipe(rank.add_crash)
            stack.callback(os.close, crashes)
            marked = replace(request, environ={**request.environ, **variables}, timeouts=self._pause.path)
            self._processes.start(number, rank, marked, [stdout, stderr, crashes])
