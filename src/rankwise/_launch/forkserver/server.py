"""The fork server: imports torch once, forks ranks on request, reaps them. There is one for each launcher.

It ends when the launcher closes the connection, however that comes about, and takes every descendant with it: so what
ends a world is a process that does nothing else, never a handler or a thread in a rank, which may be blocked in C++.
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
from collections.abc import Sequence
from typing import Final

from rankwise._launch.forkserver.interpreter_exit import leave
from rankwise._launch.forkserver.ipc import DESCRIPTORS, MESSAGE, Event, Order
from rankwise._launch.forkserver.worker import run
from rankwise._launch.interpreter import command
from rankwise._launch.process_title import set_title
from rankwise._launch.reaper import adopt_orphans, die_with_parent, end_descendants, reap
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._net.polling import wait_readable

# What most programs import: before the ranks are forked that costs once what else it costs each of them.
PRELOADED: Final = ("torch", "torch.distributed", "cloudpickle", "rankwise")


def preload(prepare: str) -> None:
    """Import what ranks will, and call what is asked for.

    Collections of garbage are kept away from it: they take time, and copy every page.
    """
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    rankwise = sys.modules["rankwise"]
    for name in rankwise.__all__:
        getattr(rankwise, name)  # imported when first asked for
    if prepare:
        pkgutil.resolve_name(prepare)()
    gc.freeze()
    gc.enable()


class Server:
    """The fork server's side of the connection to the launcher."""

    def __init__(self, control: socket.socket, *, forking: bool, prepare: str = "") -> None:
        self._control = control
        self._prepare = prepare
        self._forking = forking
        self._ranks: dict[int, int] = {}
        self._groups: set[int] = set()  # of processes, since the last sweep
        self._wakeup, wakes = os.pipe()
        self._wakes = wakes
        os.set_blocking(wakes, False)
        os.set_blocking(self._wakeup, False)

    def serve(self) -> tuple[int, int]:
        """Serve until the launcher is gone; return in a forked rank: its connection, and where it writes crashes."""
        adopt_orphans()
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        # Whoever started the launcher may have blocked or ignored it; ranks get both as they were.
        self._handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if self._forking:
            preload(self._prepare)
        while True:
            ready = wait_readable({"control": self._control, "wakeup": self._wakeup})
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
            self._tell_of_the_dead()
            if "control" in ready:
                order = self._order()
                if order is None:
                    end_descendants(self._groups)
                    os._exit(0)
                rank = self._obey(*order)
                if rank is not None:
                    return rank

    def _order(self) -> tuple[int, int, int, list[int]] | None:
        """Return the launcher's next order; None if it is gone."""
        data = b""
        descriptors: list[int] = []
        while len(data) < MESSAGE.size:
            try:
                piece, receive_available, _, _ = socket.recv_fds(self._control, MESSAGE.size - len(data), DESCRIPTORS)
            except OSError:
                return None
            if not piece:
                return None
            data += piece
            descriptors += receive_available
        order, rank, value, _ = MESSAGE.unpack(data)
        return order, rank, value, descriptors

    def _obey(self, order: int, rank: int, value: int, descriptors: list[int]) -> tuple[int, int] | None:
        if order in {Order.SIGNAL, Order.SIGNAL_ALL}:
            for pid, known in self._ranks.items():  # not reaped yet, so the number is still its own
                if known == rank:
                    _send(value, pid, to_group=order == Order.SIGNAL_ALL)
        elif order == Order.SWEEP:
            end_descendants(self._groups)
            self._groups.clear()
            self._tell(Event.SWEPT, 0)
        else:
            return self._fork(rank, descriptors)
        return None

    def _fork(self, rank: int, descriptors: list[int]) -> tuple[int, int] | None:
        server, pid = os.getpid(), -1
        if len(descriptors) < DESCRIPTORS:  # this process had no room for the others
            self._tell(Event.REFUSED, rank, errno.EMFILE)
        else:
            pid = self._forked(rank)
        if pid == 0:
            return self._be_rank(server, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._ranks[pid] = rank
            self._groups.add(pid)
            self._tell(Event.STARTED, rank, pid)
        return None

    def _forked(self, rank: int) -> int:
        """Return the new process, 0 in it; -1 if there can be none."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: numpy's are ready for this
                return os.fork()
        except OSError as error:
            self._tell(Event.REFUSED, rank, error.errno or 0)
            return -1

    def _be_rank(self, server: int, connection: int, output: int, errors: int, crashes: int) -> tuple[int, int]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.close(self._wakeup)
        os.close(self._wakes)
        self._control.close()
        os.setsid()  # Ctrl-C is for the launcher to pass on
        die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        for descriptor, number in ((output, 1), (errors, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if not self._forking:
            os.set_inheritable(connection, True)
            os.set_inheritable(crashes, True)
            os.execv(sys.executable, [*command("forkserver.worker"), str(connection), str(crashes)])  # noqa: S606
        return connection, crashes

    def _tell_of_the_dead(self) -> None:
        for pid, exitcode in reap():
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._tell(Event.ENDED, rank, exitcode)

    def _tell(self, event: Event, rank: int, value: int = 0) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the next look at the connection says so
            self._control.sendall(MESSAGE.pack(event, rank, value, time.monotonic_ns()))


def _send(number: int, pid: int, *, to_group: bool) -> None:
    try:
        (os.killpg if to_group else os.kill)(pid, number)
    except ProcessLookupError:  # it was forked just now, and leads no group yet
        os.kill(pid, number)


def main(search_path: Sequence[str]) -> None:
    """Be the fork server, and in its forks a rank, which searches for its modules where a new interpreter does."""
    open_standard_streams()  # what the launcher sends for a rank must not have their numbers
    set_title(f"rankwise: the process that the ranks of {os.getppid()} are forked from")
    control = socket.socket(fileno=int(sys.argv[1]))
    rank = Server(control, forking=sys.argv[2] == "fork", prepare=sys.argv[3]).serve()
    sys.path[:] = search_path
    imported_before = frozenset(sys.modules)
    leave(run(*rank), imported_before)
