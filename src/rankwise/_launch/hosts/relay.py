"""What the launcher of a host has of the terminal: a connection by way of the watchdog, and a console over it."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rankwise._launch.forkserver.ipc import receive_message, serialize
from rankwise._launch.other_hosts.messages import Hold, HostLost, Printed, Reply, Request, Told
from rankwise._launch.output.console import Console, RankOutput
from rankwise._launch.output.log_files import LogFile
from rankwise._launch.output.settings import Output
from rankwise._launch.output.stream_writer import StreamWriter


class TerminalLink:
    """The terminal, as a launcher reaches it: by way of the watchdog, which is its parent process.

    Attributes:
        lost: Which host is lost, and why, by the number of the meeting.
        on_writable: Called, from any thread, when it shows output again.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.lost: dict[int, str] = {}
        self.on_writable: Callable[[], None] = lambda: None
        self.writer = StreamWriter(connection.fileno(), "the connection to the terminal", on_writable=self._resume)
        self._connection = connection
        self._is_held = False
        self._numbers = itertools.count()
        self._replies: dict[int, queue.SimpleQueue[Any]] = {}
        threading.Thread(target=self._listen, daemon=True, name="rankwise-terminal").start()

    @property
    def is_full(self) -> bool:
        """The ranks should print no more for now."""
        return self._is_held or self.writer.is_full

    def send(self, message: object) -> bool:
        """Send a message; return False if nobody reads it any more."""
        return self.writer.write(serialize(message))

    def ask(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - those of the operation
        """Send a request, from any thread, and return the reply. It waits for as long as the terminal is there."""
        number = next(self._numbers)
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replies[number] = replies
        self.send(Request(number, operation, arguments))
        try:
            return replies.get()
        finally:
            del self._replies[number]

    def _listen(self) -> None:
        while True:
            try:
                message = receive_message(self._connection)
            except (EOFError, OSError):  # the watchdog was killed, and this process is about to be
                return
            if isinstance(message, Reply):
                if (replies := self._replies.get(message.number)) is not None:  # else Ctrl-C has ended the wait
                    replies.put(message.value)
            elif isinstance(message, HostLost):
                self.lost[message.meeting] = message.why
            elif isinstance(message, Hold):
                self._is_held = message.is_held
                if not message.is_held:
                    self._resume()

    def _resume(self) -> None:
        self.on_writable()  # looked up now: a console sets it later


class HostConsole(Console):
    """A console whose streams are those of the terminal."""

    def __init__(self, terminal: TerminalLink, output: Output, nproc: int) -> None:
        """Prepare for so many ranks on this host; prefixes, and which ranks are shown, are left to the terminal."""
        super().__init__(nproc=nproc, prefixed=False, logs=output.log_folder())
        self._terminal = terminal
        terminal.on_writable = self._call_on_writable

    def show_status(self, text: str, *, last: bool = False) -> None:
        """Show nothing: the terminal has a status of its own."""

    def print_message(self, text: str) -> None:
        """Send a message for the user."""
        self._terminal.send(Told(text))

    def inheritable_descriptor(self, stream: TextIO | None) -> None:
        """Return None: no rank has the terminal's descriptors."""

    def open(
        self,
        rank: int,
        stream: TextIO | None,
        *,
        local_rank: int | None = None,
        log: LogFile | None = None,
        host: str = "",  # noqa: ARG002 - as in the base class
    ) -> RankOutput:
        """Return the sender of a rank's output."""
        if log is not None and not log.is_teed:
            return RankOutput(self, rank, log=log)
        writer = _RankWriter(self._terminal, rank, rank if local_rank is None else local_rank, stream)
        return RankOutput(self, rank, writer=writer, log=log)


class _RankWriter:
    """Sends the output of one rank on one stream."""

    def __init__(self, terminal: TerminalLink, rank: int, local_rank: int, stream: TextIO | None) -> None:
        self._terminal = terminal
        self._rank = rank
        self._local_rank = local_rank
        self._is_error = stream is not None and stream.fileno() == 2

    @property
    def is_full(self) -> bool:
        return self._terminal.is_full

    def write(self, text: bytes) -> bool:
        return self._terminal.send(
            Printed(rank=self._rank, local_rank=self._local_rank, is_error=self._is_error, text=text)
        )

    def wait(self, seconds: float) -> None:
        self._terminal.writer.wait(seconds)

    def drain(self, seconds: float) -> str:
        self.wait(seconds)
        return ""
