"""The fork server, as the process sees it that started it: orders go there, and what it tells comes back."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

from rankwise._launch.forkserver.ipc import MESSAGE, PIECE_BYTES, Event, Order
from rankwise._launch.interpreter import command
from rankwise._launch.reaper import MARK, SECONDS_TO_END, end_descendants, end_marked
from rankwise.errors import LaunchError


class ForkServer:
    """A process that forks ranks from itself, and takes them with it when it ends.

    Attributes:
        control: The connection; readable when there is something to hear.
        mark: What `descendants.MARK` is in the environments of its ranks.
    """

    def __init__(
        self, environ: Mapping[str, str], *, preload: bool = True, owner: bool = False, prepare: str = ""
    ) -> None:
        """Start it.

        Args:
            environ: Its environment.
            preload: It imports torch, and forks ranks; if not, or not on Linux, ranks are fresh interpreters.
            owner: This process does nothing else, so whatever descends from it may be ended.
            prepare: What it calls before it forks: "module:function".
        """
        self.mark = uuid.uuid4().hex
        self._owner = owner
        self._inbox = bytearray()
        self._has_spoken = False
        # Elsewhere what a process has imported does not survive a fork for certain.
        mode = "fork" if preload and sys.platform == "linux" else "fresh"
        start = command("forkserver.server")
        self.control, theirs = map(_beyond_standard_streams, socket.socketpair())
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [*start, str(theirs.fileno()), mode, prepare],
                env={**environ, MARK: self.mark},
                stdin=_inherited(0),
                stdout=_inherited(1),
                stderr=_inherited(2),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, rank: int, descriptors: Sequence[int]) -> None:
        """Ask for a rank; it gets its connection, its output, its errors, and where it writes crashes."""
        self._order(Order.START, rank, descriptors=descriptors)

    def signal(self, rank: int, number: int, *, to_all: bool = False) -> None:
        """Ask to send a signal to a rank; `to_all`: to what it has started as well."""
        self._order(Order.SIGNAL_ALL if to_all else Order.SIGNAL, rank, number)

    def sweep(self) -> None:
        """Ask to end whatever is left of ranks, and to tell when that is done."""
        self._order(Order.SWEEP)

    def hear(self) -> list[tuple[Event, int, int, int]]:
        """Return what it tells, once its connection is readable: events, each with a rank, a value and a time.

        Raises:
            LaunchError: It is gone.
        """
        piece = receive_available(self.control)
        if not piece:
            raise self._lost()
        self._inbox += piece
        self._has_spoken = True
        events = []
        while len(self._inbox) >= MESSAGE.size:
            event, rank, value, time_ns = MESSAGE.unpack_from(self._inbox)
            del self._inbox[: MESSAGE.size]
            events.append((Event(event), rank, value, time_ns))
        return events

    def close(self) -> None:
        """End everything at once, the fork server included."""
        self.control.close()  # which the server takes for the launcher's end
        try:
            self._process.wait(SECONDS_TO_END)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            if self._owner:
                end_descendants()
            end_marked(self.mark)

    def _order(self, order: Order, rank: int = 0, value: int = 0, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.control, [MESSAGE.pack(order, rank, value, 0)], list(descriptors))
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> LaunchError:
        try:
            code = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return LaunchError("the process that ranks are forked from has hung up, and runs still; it is killed")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = "" if self._has_spoken else "; it had not started yet: what it printed, or its memory, may say why"
        return LaunchError(f"the process that ranks are forked from {how}; no rank is left{reason}")


def receive_available(connection: socket.socket) -> bytes:
    """Return what has come; b"" if the other side has ended."""
    try:
        return connection.recv(PIECE_BYTES)
    except ConnectionResetError:
        return b""


def _beyond_standard_streams(connection: socket.socket) -> socket.socket:
    """Return a connection whose number is not that of a standard stream, of which one may be closed."""
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 3))


def _inherited(descriptor: int) -> int | None:
    """Return what a child process has for a standard stream: the same as this one, unless that is closed."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return None
