"""The launch server: a process of a user that has imported torch, and forks processes with the imports done.

It ends when no process of it has run for 10 minutes. Its processes end with it, and with their clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from rankwise._launch.forkserver.interpreter_exit import flush
from rankwise._launch.forkserver.ipc import ServerEvent, serialize
from rankwise._launch.forkserver.server import preload
from rankwise._launch.launchserver.forked import Inheritance, run_request
from rankwise._launch.launchserver.imported_files import ImportedFiles
from rankwise._launch.launchserver.run_request import ANSWER, Answer, Query, RunRequest, ServerState, receive_request
from rankwise._launch.launchserver.server_folder import peer_user, remove_socket
from rankwise._launch.process_title import set_title
from rankwise._launch.reaper import reap, set_parent_death_signal
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._net.polling import wait_readable

_IDLE_SECONDS: Final = 600.0
# How long a client may take to send its request.
_REQUEST_SECONDS: Final = 5.0


class LaunchServer:
    """The launch server."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self._listener = listener
        self._path = Path(listener.getsockname())
        self._inode = self._path.stat().st_ino
        self._modules = modules
        self._files = ImportedFiles()
        self._started = self._last_end = time.monotonic()
        # By the process that runs for it; None if the client has ended, and the process is about to.
        self._clients: dict[int, socket.socket | None] = {}
        self._is_stopping = False
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(self._wakeup_writer, False)

    def serve(self) -> tuple[RunRequest, list[int]]:
        """Serve until this process is not needed any more. Returns only in a fork, with its request and its streams."""
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        self._handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        while self._clients or not self._is_stopping:
            ready = wait_readable(self._descriptors(), self._patience())
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup_reader, 4096)
            self._report_ends()
            for key in ready:
                if isinstance(key, int):
                    self._forward(key)
            if "listener" in ready:
                request = self._accept()
                if request is not None:
                    return request
            if not self._clients and time.monotonic() - self._last_end >= _IDLE_SECONDS:
                self._stop()
        os._exit(0)

    def _descriptors(self) -> dict[str | int, int | socket.socket]:
        found: dict[str | int, int | socket.socket] = {"wakeup": self._wakeup_reader}
        found |= {pid: client for pid, client in self._clients.items() if client is not None}
        return found if self._is_stopping else {**found, "listener": self._listener}

    def _patience(self) -> float | None:
        return None if self._clients else max(0.0, self._last_end + _IDLE_SECONDS - time.monotonic())

    def _forward(self, pid: int) -> None:
        """Send the signals that a client names to its process; SIGKILL if the client has ended."""
        client = self._clients.get(pid)
        if client is None:
            return  # its process has ended
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = client.recv(64)
        for number in numbers or (signal.SIGKILL,):
            os.kill(pid, number)  # not reaped yet, so the process id is not reused
        if not numbers:
            client.close()
            self._clients[pid] = None

    def _report_ends(self) -> None:
        for pid, exitcode in reap():
            client = self._clients.pop(pid, None)
            self._last_end = time.monotonic()
            if client is not None:
                with client:
                    _answer(client, Answer.ENDED, exitcode)

    def _accept(self) -> tuple[RunRequest, list[int]] | None:
        client, _ = self._listener.accept()
        if peer_user(client) != os.geteuid():
            client.close()
            return None
        client.settimeout(_REQUEST_SECONDS)
        try:
            request, descriptors = receive_request(client)
        except (OSError, EOFError, pickle.PickleError, AttributeError, ImportError):
            client.close()
            return None
        client.settimeout(None)
        if isinstance(request, RunRequest):
            return self._start(client, request, descriptors)
        with client, contextlib.suppress(OSError):
            if not isinstance(request, Query):
                self._stop()
            client.sendall(serialize(self._state()))
        return None

    def _start(
        self, client: socket.socket, request: RunRequest, descriptors: list[int]
    ) -> tuple[RunRequest, list[int]] | None:
        """Fork a process for a request, and return in it."""
        pid = -1
        if self._files.changed():
            self._stop()
            answer, value = Answer.STALE, 0
        else:
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                answer, value = Answer.REFUSED, error.errno or 0
            if pid == 0:
                self._leave(client, server)
                return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            with client:
                _answer(client, answer, value)
        else:
            self._clients[pid] = client
            _answer(client, Answer.ACCEPTED, pid)
        return None

    def _leave(self, client: socket.socket, server: int) -> None:
        """Release what belongs to the server, in a fork of it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._handler)
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        for connection in (client, self._listener, *self._clients.values()):
            if connection is not None:
                connection.close()
        self._clients.clear()
        set_parent_death_signal()
        if os.getppid() != server:  # it has ended before the line above, which then has no effect
            os._exit(1)

    def _stop(self) -> None:
        """Accept no more clients, and end with the last process."""
        if not self._is_stopping:
            self._is_stopping = True
            # Clients that have connected already see that the connection is closed, and start another server.
            remove_socket(self._path, self._inode)
            self._listener.close()

    def _state(self) -> ServerState:
        now = time.monotonic()
        return ServerState(
            pid=os.getpid(),
            executable=sys.executable,
            modules=tuple(self._modules),
            age=now - self._started,
            idle=0.0 if self._clients else now - self._last_end,
            running=len(self._clients),
            is_stopping=self._is_stopping,
        )


def _answer(client: socket.socket, answer: Answer, value: int) -> None:
    with contextlib.suppress(OSError):  # the client has ended, which the next read from the connection shows
        client.sendall(ANSWER.pack(answer, value))


def main(search_path: Sequence[str]) -> None:
    """Run a launch server; in its forks, run what clients have requested."""
    open_standard_streams()  # received descriptors must not get their numbers
    set_title("rankwise: launch server")
    os.chdir("/")  # it outlives the folder that it was started in
    listener = socket.socket(fileno=int(sys.argv[1]))
    prepare, refused, modules = sys.argv[2:]
    del sys.argv[1:]  # the modules do not get them
    reasons: dict[str, str] = json.loads(refused)

    def report(event: ServerEvent, text: str) -> None:
        if event is ServerEvent.NOT_PRELOADED:
            name, _, reason = text.partition("\0")
            reasons[name] = reason

    def start_again(left: Sequence[str], environ: dict[str, str]) -> NoReturn:
        command = [*sys.orig_argv[:-2], json.dumps(reasons), ",".join(left)]
        os.execve(sys.executable, command, environ)  # noqa: S606 - this program

    names = modules.split(",") if modules else []
    effects = preload(prepare, names, report, start_again)
    listener.set_inheritable(False)
    _detach()
    request, descriptors = LaunchServer(listener, names).serve()
    run_request(request, descriptors, Inheritance(effects=effects, reasons=reasons, search_path=search_path))


def _detach() -> None:
    """Close the streams of the client that has started this process: errors of imports are shown there, and no more."""
    flush(report=False)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
