"""A process that a launch server has forked for a client: it takes the place of the client, and runs its function."""

from __future__ import annotations

import importlib
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import psutil

from rankwise._launch.forkserver.client import ForkServer, control_connection
from rankwise._launch.forkserver.interpreter_exit import flush
from rankwise._launch.forkserver.ipc import ServerEvent
from rankwise._launch.forkserver.preloading import ImportEffects
from rankwise._launch.forkserver.server import Server, serve_ranks
from rankwise._launch.forkserver.worker import prepare_process
from rankwise._launch.launchserver.run_request import RunRequest
from rankwise._launch.process_title import set_title
from rankwise._launch.reaper import become_subreaper

# Signals that the interpreter ignores from its start.
_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a process has from its launch server.

    Attributes:
        effects: What the preloaded modules have set.
        reasons: Why a module is not preloaded, by its name.
        search_path: The search path of a new interpreter.
    """

    effects: ImportEffects
    reasons: Mapping[str, str]
    search_path: Sequence[str]


def run_request(request: RunRequest, descriptors: Sequence[int], inheritance: Inheritance) -> NoReturn:
    """Run the function of a request in this process, which the launch server has forked, and end it.

    The function gets a fork server for ranks, and the arguments of the request.
    """
    status = 1
    try:
        _take_place(request, descriptors)
        server = _fork_server(inheritance)
        status = pkgutil.resolve_name(request.target)(server, *pickle.loads(request.call))
    except BaseException:  # noqa: BLE001 - no caller is left
        traceback.print_exc()
    finally:
        flush()
        os._exit(status)


def _take_place(request: RunRequest, descriptors: Sequence[int]) -> None:
    """Set up this process like one that the client has started."""
    os.setsid()  # its client sends it the signals of the terminal
    for number in range(3):
        os.close(number)
    for number, descriptor in zip(request.streams, descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    os.umask(request.umask)
    os.chdir(request.folder)
    prepare_process(request.environ, request.argv)
    sys.path[:] = request.search_path
    importlib.invalidate_caches()
    set_title(" ".join([sys.executable, *request.argv]))


def _fork_server(inheritance: Inheritance) -> ForkServer:
    """Fork a fork server for ranks: before this process starts threads, or imports what is the user's."""
    control, theirs = control_connection()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            os.setsid()
            become_subreaper()
            set_title(f"rankwise: fork server of process {launcher}")
            server = Server(theirs)
            server.effects = inheritance.effects
            for name, reason in inheritance.reasons.items():
                server.report_text(ServerEvent.NOT_PRELOADED, f"{name}\0{reason}")
            serve_ranks(server, inheritance.search_path)
        finally:
            os._exit(1)
    theirs.close()
    return ForkServer(_ChildProcess(pid), control, uuid.uuid4().hex, owns_descendants=True)


class _ChildProcess:
    """A forked child of this process, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        self._process = psutil.Process(pid)

    def wait(self, timeout: float | None = None) -> int:
        try:
            self.returncode = self._process.wait(timeout) or 0
        except psutil.TimeoutExpired as error:
            raise subprocess.TimeoutExpired("the fork server", timeout or 0) from error
        return self.returncode

    def kill(self) -> None:
        self._process.kill()
