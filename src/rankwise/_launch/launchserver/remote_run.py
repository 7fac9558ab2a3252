"""Running a function in a fork of a launch server, in place of this process: the client's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rankwise._launch.forkserver.ipc import receive_message
from rankwise._launch.interpreter import interpreter_command, working_directory
from rankwise._launch.launchserver.run_request import (
    Answer,
    Query,
    RunRequest,
    ServerState,
    Stop,
    receive_answer,
    send_request,
)
from rankwise._launch.launchserver.server_folder import ServerFolder, connect, locked
from rankwise._launch.launchserver.server_identity import ServerIdentity
from rankwise._launch.resource_limits import advice_for
from rankwise.errors import LaunchError

# The signals that the process of the request gets when this one gets them.
_FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)
# A server that ends, or whose files have changed, is replaced by another one. More would mean that files change again
# and again.
_ATTEMPTS: Final = 3
# Each idle server takes the memory of one process with its imports. More of them are stopped, the oldest first.
_MOST_IDLE: Final = 3
_ANSWER_SECONDS: Final = 2.0


class LaunchServers:
    """The launch servers of this user."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Prepare.

        Args:
            environ: The environment.

        Raises:
            LaunchError: They cannot be used here.
        """
        if sys.platform != "linux":
            raise LaunchError(f"launch servers need Linux, and this is {sys.platform}: leave out --keep")
        self._folder = ServerFolder(environ.get("XDG_RUNTIME_DIR"))
        self._environ = dict(environ)

    def run(self, identity: ServerIdentity, target: str, call: Sequence[Any]) -> int:
        """Run a function in a fork of a server, which is started if there is none, and return its exit status.

        Args:
            identity: The server.
            target: The function, as "module:function". Its first argument is a fork server for ranks.
            call: Its other arguments.

        Raises:
            LaunchError: No server could be started, or it was killed.
        """
        request = self._request(target, call)
        path = self._folder.socket_path(identity.digest())
        for _ in range(_ATTEMPTS):
            connection, process = self._connect(path, identity)
            with connection:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send_request(connection, request)
                answer = receive_answer(connection)
                if answer is not None and answer[0] is Answer.ACCEPTED:
                    return _wait(connection)
            if answer is not None and answer[0] is Answer.REFUSED:
                number = answer[1]
                raise LaunchError(f"the launch cannot be started here: {os.strerror(number)}{advice_for(number)}")
            if answer is None and process is not None:
                raise LaunchError(
                    f"the launch server could not start (exit code {process.wait()}): see what it printed, and its "
                    "memory limit"
                )
        raise LaunchError("each launch server found files of its modules changed after it had imported them")

    def states(self) -> list[ServerState]:
        """Return the states of all servers that answer."""
        return [state for path in self._folder.sockets() if (state := _ask(path, Query())) is not None]

    def stop(self) -> list[ServerState]:
        """Stop all servers, each when the last of its processes has ended, and return their states."""
        return [state for path in self._folder.sockets() if (state := _ask(path, Stop())) is not None]

    def _request(self, target: str, call: Sequence[Any]) -> RunRequest:
        mask = os.umask(0o077)
        os.umask(mask)
        return RunRequest(
            target=target,
            call=pickle.dumps(tuple(call)),
            argv=sys.argv,
            search_path=sys.path,
            environ=self._environ,
            folder=working_directory(),
            umask=mask,
            streams=[number for number in range(3) if _is_open(number)],
            ignored=[int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
            blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        )

    def _connect(self, path: Path, identity: ServerIdentity) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """Return a connection to the server, and the server itself if it was started just now."""
        connection = connect(path)
        if connection is not None:
            return connection, None
        with locked(self._folder.path):
            connection = connect(path)  # another client may have started it
            if connection is not None:
                return connection, None
            process = self._start(path, identity)
            connection = connect(path)
        if connection is None:
            raise LaunchError(f"the launch server does not listen at {path}")
        self._stop_idle(path)
        return connection, process

    def _start(self, path: Path, identity: ServerIdentity) -> subprocess.Popen[bytes]:
        with self._folder.listen(path) as listener:
            command = interpreter_command("launchserver.daemon")
            return subprocess.Popen(  # noqa: S603 - this interpreter
                [*command, str(listener.fileno()), identity.prepare, "{}", ",".join(identity.modules)],
                env=dict(identity.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def _stop_idle(self, started: Path) -> None:
        """Stop the servers that have been idle longest, so that not too many are kept."""
        found = [
            (state.idle, path) for path in self._folder.sockets() if path != started and (state := _ask(path, Query()))
        ]
        idle = sorted((seconds, path) for seconds, path in found if seconds)
        for _, path in idle[_MOST_IDLE - 1 :]:
            _ask(path, Stop())


def _ask(path: Path, request: Query | Stop) -> ServerState | None:
    """Return the answer of a server; None if it has ended, or is still starting."""
    connection = connect(path)
    if connection is None:
        return None
    with connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            send_request(connection, request)
            state: ServerState = receive_message(connection)
        except (OSError, EOFError):
            return None
    return state


def _wait(connection: socket.socket) -> int:
    """Forward signals to the process until it has ended, and return its exit status."""
    with _forwarding(connection):
        answer = receive_answer(connection)
    if answer is None:
        raise LaunchError("the launch server was killed, and the ranks with it")
    status = answer[1]
    if status < 0:
        raise LaunchError(f"the process of this launch was killed by {signal.Signals(-status).name}, its ranks with it")
    return status


@contextmanager
def _forwarding(connection: socket.socket) -> Iterator[None]:
    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has ended
            connection.send(bytes([number]))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    # A signal that is ignored at the start, such as SIGHUP under nohup, stays ignored here and there.
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
