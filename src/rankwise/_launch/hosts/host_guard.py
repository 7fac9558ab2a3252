"""The process that ssh starts on a host: it starts the agent there, and ends it with the connection to the launcher.

It does nothing that may block, in compiled code for example, as the agent does. It reads what the launcher sends, and
gives the agent its messages and signals; what the agent sends goes to the launcher directly, on standard output. When
the connection has ended, or nothing has come for long, it kills the agent and all descendants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rankwise._launch.forkserver.ipc import READ_BYTES, pop_messages, serialize
from rankwise._launch.forwarded_signals import leave_to_ranks
from rankwise._launch.hosts.host_messages import Alive, Deliver, Hello, HostEnded, HostStart
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.reaper import become_subreaper, kill_descendants
from rankwise._launch.spec import own_environ
from rankwise._net.polling import READABLE, poll
from rankwise.errors import LaunchError

# How often the launcher says that it is there, and after how long a silence it is not.
ALIVE_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.05
# "CLIENT PORT SERVER PORT", set by sshd.
_CONNECTION: Final = "SSH_CONNECTION"


def version() -> str:
    """Return the version of rankwise; "" if it is a copy that was not installed."""
    try:
        return metadata.version("rankwise")
    except metadata.PackageNotFoundError:
        return ""


def python_version() -> str:
    """Return the version of Python, such as "3.12": functions and modules of another one cannot be used."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


class HostGuard:
    """The guard of an agent."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._agent: subprocess.Popen[bytes] | None = None
        self._connection, self._theirs = socket.socketpair()
        self._unsent = bytearray()
        self._silent_from = time.monotonic() + SILENT_SECONDS

    def run(self) -> None:
        """Run until the agent, or the connection, has ended."""
        self._connection.setblocking(False)
        while time.monotonic() < self._silent_from:
            events = {0: READABLE}
            if self._agent is not None:
                events[self._connection.fileno()] = READABLE
            left = min(ALIVE_SECONDS, self._silent_from - time.monotonic())
            ready = dict(poll(events, _RETRY_SECONDS if self._unsent else max(0.0, left)))
            if self._connection.fileno() in ready:
                return  # the agent has ended: it sends nothing here
            if 0 in ready and not self._receive():
                return
            self._send()

    def close(self) -> int:
        """Kill what is left, and return the exit status of the agent."""
        agent = self._agent
        status = 1
        if agent is not None:
            if self._has_ended():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = agent.wait(ALIVE_SECONDS)
            agent.kill()
            agent.wait()
        kill_descendants()
        return status

    def _has_ended(self) -> bool:
        """Return whether the agent has closed its connection."""
        return bool(poll({self._connection.fileno(): READABLE}, 0))

    def _receive(self) -> bool:
        """Read what the launcher has sent, and return whether it may send more."""
        piece = os.read(0, READ_BYTES)
        if not piece:
            return False
        self._silent_from = time.monotonic() + SILENT_SECONDS
        self._received += piece
        for message in pop_messages(self._received):
            self._handle(message)
        return True

    def _handle(self, message: Any) -> None:  # noqa: ANN401 - any message
        if isinstance(message, HostStart):
            self._start(message)
        elif isinstance(message, Deliver):
            if message.signum == signal.SIGTSTP:  # the launcher is about to stop, and says nothing meanwhile
                self._silent_from = float("inf")
            if self._agent is not None:
                self._agent.send_signal(message.signum)
        elif not isinstance(message, Alive):
            self._unsent += serialize(message)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the agent does not read now, or has ended
            del self._unsent[: self._connection.send(self._unsent) if self._unsent else 0]

    def _start(self, start: HostStart) -> None:
        try:
            os.chdir(start.folder)
        except OSError as error:
            text = (
                f"the working directory {start.folder!r} cannot be used there: {error.strerror}; ranks run in the "
                "directory of the launcher: create it, or start the launcher in one that all hosts have"
            )
            os.write(1, serialize(HostEnded(error=LaunchError(text))))
            sys.exit(1)
        self._agent = subprocess.Popen(  # noqa: S603 - this interpreter
            [*interpreter_command("hosts.host_agent"), str(self._theirs.fileno())],
            env={**own_environ(), **start.environ},
            stdin=subprocess.DEVNULL,
            pass_fds=[self._theirs.fileno()],
        )
        self._theirs.close()


def main(search_path: Sequence[str]) -> None:  # noqa: ARG001 - of processes that import a script
    """Guard an agent."""
    client, _, server, *_ = f"{own_environ().get(_CONNECTION, '')}   ".split(" ")
    hello = Hello(
        version=version(),
        folder=str(Path(__file__).parents[2]),
        hostname=socket.gethostname(),
        python=python_version(),
        client=client,
        server=server,
    )
    become_subreaper()
    # The launcher may have gone: the end of its connection is noticed below, and not by a signal.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    leave_to_ranks()
    os.write(1, hello.line())
    guard = HostGuard()
    try:
        guard.run()
    finally:
        status = guard.close()
    os._exit(status if status >= 0 else 128 - status)
