"""The fork server: imports torch once, forks ranks on request, and reaps them. Each launcher has one.

It ends when the connection to the launcher is closed, for any reason, and kills all of its descendants before. So
a world is ended by a process that does nothing else, never by a handler or a thread in a rank, which C++ may block.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import pkgutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Final

from rankwise._launch.forkserver.interpreter_exit import exit_interpreter
from rankwise._launch.forkserver.ipc import CONTROL_MESSAGE, DESCRIPTORS, ServerCommand, ServerEvent
from rankwise._launch.forkserver.preloading import ImportEffects, preload_modules
from rankwise._launch.forkserver.worker import run_worker
from rankwise._launch.forwarded_signals import FOR_RANKS, leave_to_ranks
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.process_title import set_title
from rankwise._launch.reaper import become_subreaper, kill_descendants, reap, services, set_parent_death_signal
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._net.polling import wait_readable

# Modules that most programs import, and one that joining imports: imported here once, and not in each rank. That one
# appends a temporary folder to the search path in older versions of torch, which would be a leak of a test that joins.
PRELOADED: Final = ("torch", "torch.distributed", "torch.distributed.nn.functional", "cloudpickle", "rankwise")


def preload(prepare: str, modules: Sequence[str], report: Callable[[ServerEvent, str], None]) -> ImportEffects:
    """Import the modules that ranks need, and call a function.

    The garbage collector is disabled meanwhile, and ignores these objects afterwards: a collection takes time, and in
    a forked rank it writes to each object's header, so that the kernel copies every page.

    Args:
        prepare: The function, as "module:function"; "" for none.
        modules: The modules that the user has named.
        report: As for `preload_modules`.
    """
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    rankwise = sys.modules["rankwise"]
    for name in rankwise.__all__:
        getattr(rankwise, name)  # names of the package are imported at their first use
    if prepare:
        pkgutil.resolve_name(prepare)()
    effects = preload_modules(modules, report)
    gc.freeze()
    gc.enable()
    return effects


class Server:
    """The fork server."""

    def __init__(self, control: socket.socket, *, forking: bool) -> None:
        self._control = control
        self._forking = forking
        self._ranks: dict[int, int] = {}
        self._groups: set[int] = set()  # of processes, since the last sweep
        self._left: list[int] = []  # processes that SIGKILL has not ended
        self._services: list[int] = []  # that outlive ranks which have ended normally
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        os.set_blocking(self._wakeup_reader, False)

    def serve(self) -> tuple[int, int]:
        """Serve until the launcher closes the connection. Returns only in a forked rank.

        Returns:
            The descriptors of the rank's connection, and of its file for stacks after a crash.
        """
        # The server has one thread, since it forks, and waits for two things: a command of the launcher, and SIGCHLD. A
        # signal that came between a look and the wait would be lost; so its handler is empty, and Python writes a byte
        # to a pipe that the wait includes. One byte may stand for several ends: `_report_ends` reaps all there are.
        #
        # Ends come before commands, always: a SWEEP reaps every child, and a SIGNAL goes to a process id only as long
        # as that is not reaped, or another process could have it by then. When the launcher is gone, for whatever
        # reason, the connection ends, and all descendants are killed: this is the promise that nothing is left behind.
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        # The launcher may have inherited SIGCHLD blocked or ignored; ranks get back what it inherited.
        self._handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None), **leave_to_ranks()}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        while True:
            ready = wait_readable({"control": self._control, "wakeup": self._wakeup_reader})
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup_reader, 4096)
            # First the ends: a sweep reaps all children, and would lose the exit codes of ranks that have just ended.
            self._report_ends()
            if "control" in ready:
                command = self._receive_command()
                if command is None:
                    kept = services(self._groups) if self._services else []  # they may have started more processes
                    kill_descendants(self._groups, [*self._left, *kept])
                    os._exit(0)
                rank = self._execute(*command)
                if rank is not None:
                    return rank

    def _receive_command(self) -> tuple[int, int, int, list[int]] | None:
        """Receive the next command of the launcher; return None if it has ended."""
        data = b""
        descriptors: list[int] = []
        while len(data) < CONTROL_MESSAGE.size:
            try:
                piece, received, _, _ = socket.recv_fds(self._control, CONTROL_MESSAGE.size - len(data), DESCRIPTORS)
            except OSError:
                return None
            if not piece:
                return None
            data += piece
            descriptors += received
        command, rank, value, _ = CONTROL_MESSAGE.unpack(data)
        return command, rank, value, descriptors

    def _execute(self, command: int, rank: int, value: int, descriptors: list[int]) -> tuple[int, int] | None:
        if command in {ServerCommand.SIGNAL, ServerCommand.SIGNAL_GROUP}:
            for pid, known in self._ranks.items():  # not reaped yet, so the process id is not reused
                if known == rank:
                    _signal(value, pid, to_group=command == ServerCommand.SIGNAL_GROUP)
        elif command == ServerCommand.SWEEP:
            self._services = services(self._groups) if value else []
            left = kill_descendants(self._groups, [*self._left, *self._services])
            self._left = [pid for pid in left if pid not in self._services]
            self._groups.clear()
            for pid in self._left:
                self._report(ServerEvent.LEFT, 0, pid)
            self._report(ServerEvent.SWEPT, 0)
        else:
            return self._fork(rank, descriptors)
        return None

    def _fork(self, rank: int, descriptors: list[int]) -> tuple[int, int] | None:
        server, pid = os.getpid(), -1
        if len(descriptors) < DESCRIPTORS:  # the others exceeded the limit of this process
            self._report(ServerEvent.REFUSED, rank, errno.EMFILE)
        else:
            # A signal that a rank gets before it has its own handlers back must not be lost.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)
            pid = self._try_fork(rank)
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid == 0:
            return self._become_rank(server, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._ranks[pid] = rank
            self._groups.add(pid)
            self._report(ServerEvent.STARTED, rank, pid)
        return None

    def _try_fork(self, rank: int) -> int:
        """Fork, and return as `os.fork`; -1 if the host has no resources for another process."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: numpy's are ready for this
                return os.fork()
        except OSError as error:
            self._report(ServerEvent.REFUSED, rank, error.errno or 0)
            return -1

    def _become_rank(self, server: int, connection: int, output: int, errors: int, crashes: int) -> tuple[int, int]:
        signal.set_wakeup_fd(-1)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        if signal.SIGINT in signal.sigpending():  # the program has not begun, and has no traceback to print
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        self._control.close()
        os.setsid()  # the terminal sends Ctrl-C to the launcher alone, which forwards it
        set_parent_death_signal()
        if os.getppid() != server:  # it has ended before the line above, which then has no effect
            os._exit(1)
        for descriptor, number in ((output, 1), (errors, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if not self._forking:
            os.set_inheritable(connection, True)
            os.set_inheritable(crashes, True)
            os.execv(sys.executable, [*interpreter_command("forkserver.worker"), str(connection), str(crashes)])  # noqa: S606
        return connection, crashes

    def _report_ends(self) -> None:
        for pid, exitcode in reap():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._report(ServerEvent.ENDED, rank, exitcode)

    def _report(self, event: ServerEvent, rank: int, value: int = 0) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended: the next read from the connection finds that
            self._control.sendall(CONTROL_MESSAGE.pack(event, rank, value, time.monotonic_ns()))

    def report_text(self, event: ServerEvent, text: str) -> None:
        """Report one of TEXT_EVENTS."""
        data = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            self._control.sendall(CONTROL_MESSAGE.pack(event, 0, len(data), time.monotonic_ns()) + data)


def _signal(signum: int, pid: int, *, to_group: bool) -> None:
    try:
        (os.killpg if to_group else os.kill)(pid, signum)
    except ProcessLookupError:  # it was forked just now, and has no group of its own yet
        os.kill(pid, signum)


def main(search_path: Sequence[str]) -> None:
    """Run the fork server; in its forks, run a rank, with the search path of a new interpreter."""
    open_standard_streams()  # received descriptors must not get their numbers
    set_title(f"rankwise: fork server of process {os.getppid()}")
    control = socket.socket(fileno=int(sys.argv[1]))
    mode, prepare, modules = sys.argv[2:]
    del sys.argv[1:]  # the modules do not get them
    server = Server(control, forking=mode == "fork")
    become_subreaper()
    effects = ImportEffects(environ={}, search_path=())
    if mode == "fork":  # before the signal handlers: a module may set its own, which ranks get back
        effects = preload(prepare, modules.split(",") if modules else (), server.report_text)
    rank = server.serve()
    sys.path[:] = [*search_path, *effects.search_path]
    imported_before = frozenset(sys.modules)
    exit_interpreter(run_worker(*rank, effects.environ), imported_before)
