"""The client of the fork server, in the process that started it: it sends commands, and receives events."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rankwise._launch.forkserver.ipc import CONTROL_MESSAGE, READ_BYTES, TEXT_EVENTS, ServerCommand, ServerEvent
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.reaper import LAUNCH_ID, SECONDS_TO_END, kill_descendants, kill_launch
from rankwise.errors import LaunchError

# How long an import may take before a message names it.
_SILENT_SECONDS: Final = 10.0

# How long after SIGKILL the fork server is waited for.
_KILL_SECONDS: Final = 1.0
_OWN_PROCESS: Final = Path("/proc/self")


class PreloadProgress:
    """The imports of a fork server.

    Attributes:
        is_over: The fork server has imported all modules, and starts ranks.
        current: The module that it imports now; "" for torch, and after the last.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.is_over = not names
        self.current = ""
        self._since = time.monotonic()
        self._not_preloaded: dict[str, str] = {}

    def record(self, event: ServerEvent, text: str) -> None:
        """Record IMPORTING or NOT_PRELOADED."""
        if event is ServerEvent.NOT_PRELOADED:
            name, _, reason = text.partition("\0")
            self._not_preloaded[name] = reason
        else:
            self.current, self._since = text, time.monotonic()
            self.is_over = not text

    def messages(self) -> Iterator[str]:
        """Yield the messages that are due, each once."""
        if self.current and time.monotonic() - self._since > _SILENT_SECONDS:
            yield f"rankwise: still importing {self.current}, as --preload asks for; Ctrl-C ends it"
            self._since = float("inf")
        if self.is_over and self._not_preloaded:
            reasons = "; ".join(f"{name} ({reason})" for name, reason in self._not_preloaded.items())
            yield f"rankwise: not preloaded, but imported by each rank: {reasons}"
            self._not_preloaded.clear()


class ForkServer:
    """A process that forks ranks, and kills them when it ends.

    Attributes:
        control: The connection to it; readable when events have arrived.
        launch_id: The value of the variable `reaper.LAUNCH_ID` in the environments of its ranks.
        preloading: The modules that it imports.
        owns_descendants: This process does nothing else, so all of its descendants may be killed.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        preload: Sequence[str] | None = (),
        owns_descendants: bool = False,
        prepare: str = "",
    ) -> None:
        """Start the process, in a new interpreter.

        Args:
            environ: Its environment.
            preload: The modules that it imports after torch, before it forks ranks. With None, or not on Linux, each
                rank is a new interpreter.
            owns_descendants: As the attribute.
            prepare: The function that it calls before it forks, as "module:function".

        Raises:
            LaunchError: There is no interpreter to start, or no /proc.
        """
        self.launch_id = uuid.uuid4().hex
        self.owns_descendants = owns_descendants
        self._inbox = bytearray()
        self._has_answered = False
        # Elsewhere than on Linux, imported libraries may not survive a fork.
        mode = "fork" if preload is not None and sys.platform == "linux" else "fresh"
        if mode == "fork" and not _OWN_PROCESS.exists():
            raise LaunchError(
                "ranks of Python use /proc, which is missing here: mount it, as with 'mount -t proc proc /proc'"
            )
        modules = tuple(preload or ()) if mode == "fork" else ()
        self.preloading = PreloadProgress(modules)
        command = interpreter_command("forkserver.server")
        self.control, theirs = map(_beyond_standard_streams, socket.socketpair())
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [*command, str(theirs.fileno()), mode, prepare, ",".join(modules)],
                env={**environ, LAUNCH_ID: self.launch_id},
                stdin=_inherited(0),
                stdout=_inherited(1),
                stderr=_inherited(2),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, rank: int, descriptors: Sequence[int]) -> None:
        """Start a rank with these descriptors: connection, standard output, standard error, file for crashes."""
        self._send(ServerCommand.START, rank, descriptors=descriptors)

    def signal(self, rank: int, signum: int, *, to_group: bool = False) -> None:
        """Send a signal to a rank; with `to_group`, to its process group."""
        self._continue()
        self._send(ServerCommand.SIGNAL_GROUP if to_group else ServerCommand.SIGNAL, rank, signum)

    def sweep(self, *, keeps_services: bool = False) -> None:
        """Kill all processes that are left of the ranks. The event SWEPT follows when that is done.

        Args:
            keeps_services: Those in sessions of their own are left, now and when the fork server ends.
        """
        self._continue()
        self._send(ServerCommand.SWEEP, value=int(keeps_services))

    def receive_events(self) -> list[tuple[ServerEvent, int, int, int]]:
        """Return the events that have arrived, each with a rank, a value and a time; `control` has to be readable.

        Raises:
            LaunchError: The fork server has ended.
        """
        piece = receive_available(self.control)
        if not piece:
            raise self._lost()
        self._inbox += piece
        self._has_answered = True
        return self._pop_events()

    def _pop_events(self) -> list[tuple[ServerEvent, int, int, int]]:
        events = []
        while len(self._inbox) >= CONTROL_MESSAGE.size:
            event, rank, value, time_ns = CONTROL_MESSAGE.unpack_from(self._inbox)
            end = CONTROL_MESSAGE.size + (value if event in TEXT_EVENTS else 0)
            if len(self._inbox) < end:
                break
            if event in TEXT_EVENTS:
                text = self._inbox[CONTROL_MESSAGE.size : end].decode(errors="replace")
                self.preloading.record(ServerEvent(event), text)
            else:
                events.append((ServerEvent(event), rank, value, time_ns))
            del self._inbox[:end]
        return events

    def close(self) -> None:
        """Kill all ranks and end the fork server."""
        self._continue()
        self.control.close()  # the server ends when this connection is closed, and kills all ranks before
        if not self.preloading.is_over:  # it does not read the connection, and has no ranks
            self._process.kill()
        try:
            self._process.wait(SECONDS_TO_END)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait itself
                self._process.wait(_KILL_SECONDS)
        if self._process.returncode != 0:
            if self.owns_descendants:
                kill_descendants()
            kill_launch(self.launch_id)

    def _send(self, command: ServerCommand, rank: int = 0, value: int = 0, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [CONTROL_MESSAGE.pack(command, rank, value, 0)], list(descriptors))
        except OSError as error:
            raise self._lost() from error

    def _continue(self) -> None:
        """Continue the server if it was stopped: nobody else could end the ranks."""
        self._process.send_signal(signal.SIGCONT)  # not to another process, if it has ended

    def _lost(self) -> LaunchError:
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return LaunchError(
                "the process that ranks are forked from has closed its connection but is still running; it is killed"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):  # closed, or without more data
            while piece := self.control.recv(READ_BYTES, socket.MSG_DONTWAIT):
                self._inbox += piece
        self._pop_events()  # they may name the module that has ended it
        reason = "" if self._has_answered else "; it had not started yet: see what it printed, and its memory limit"
        if self.preloading.current:
            reason = f"; it was importing {self.preloading.current}, which cannot be preloaded"
        return LaunchError(f"the process that ranks are forked from {how}; no rank is left{reason}")


def receive_available(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived; b"" if the other side has ended.

    Raises:
        BlockingIOError: None have arrived, and the connection does not block.
    """
    try:
        return connection.recv(READ_BYTES)
    except ConnectionResetError:
        return b""


def _beyond_standard_streams(connection: socket.socket) -> socket.socket:
    """Return the connection with a descriptor above those of the standard streams, some of which may be closed."""
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 3))


def _inherited(descriptor: int) -> int | None:
    """Return the argument of Popen for a standard stream: inherited from this process, unless it is closed here."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return None
