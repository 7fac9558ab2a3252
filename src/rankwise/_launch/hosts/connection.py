"""The connection of the terminal to one host: its watchdog and its launcher, what they send, and how they end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from enum import Enum, auto
from io import RawIOBase
from typing import IO, Any, Final, cast

from rankwise._launch.forkserver.ipc import READ_BYTES, pop_messages, serialize
from rankwise._launch.hosts.ssh_command import HostCommand
from rankwise._launch.interpreter import interpreter_command
from rankwise._launch.other_hosts.messages import HELLO_MARK, Alive, Hello, HostEnded
from rankwise._launch.other_hosts.watchdog import python_version, version
from rankwise._net.polling import READABLE, EventLoop, poll
from rankwise.errors import LaunchError

# How long ssh may take to end after it has closed its output.
_END_SECONDS: Final = 5.0
_LAST_BYTES: Final = 4096
# How much shells may print when they start.
_MOST_BEFORE: Final = 1 << 16


class HostState(Enum):
    """The state of a host."""

    CONNECTING = auto()  # ssh has been started
    STARTING = auto()  # its watchdog has answered
    READY = auto()  # its launcher waits for a round of hosts
    RUNNING = auto()  # it has ranks
    ENDED = auto()  # its launcher has reported its end
    LOST = auto()  # it has ended without a report, or never answered


class HostConnection:
    """One host.

    Attributes:
        name: Its name, as the user has given it.
        command: How its watchdog is started.
        state: Its state.
        hello: The first message of its watchdog; None before.
        ended: The report of its launcher; None before.
        lost: Why it is lost; None if it is not.
        is_released: Its connection was closed because it is not needed any more.
        since: When it was started, on the monotonic clock.
        request: The number of the request with which its launcher waits for a round.
        round: The last round that it is, or was, in; 0 for none.
        seconds: How long its ranks wait for others; None while that is not known.
        deadline: When its launcher has to have ended, or to wait for a round.
        is_held: It was told to send no more output.
    """

    def __init__(
        self,
        command: HostCommand,
        loop: EventLoop,
        *,
        on_message: Callable[[HostConnection, Any], None],
        on_text: Callable[[bytes], None],
    ) -> None:
        """Start its watchdog.

        Args:
            command: How.
            loop: The event loop.
            on_message: Called with each message from the host, and with None when it is over.
            on_text: Called with what processes there, or ssh, print on standard error beside their ranks.

        Raises:
            LaunchError: There is no ssh.
        """
        self.name = command.name
        self.command = command
        self.state = HostState.CONNECTING
        self.hello: Hello | None = None
        self.ended: HostEnded | None = None
        self.lost: LaunchError | None = None
        self.is_released = False
        self.since = time.monotonic()
        self.request = self.round = 0
        self.seconds: float | None = None
        self.deadline = float("inf")
        self.is_held = False
        self._loop = loop
        self._on_message = on_message
        self._on_text = on_text
        self._inbox = bytearray()
        self._unsent = bytearray()
        self._is_flushing = False
        self._last = b""
        self._process = _started(command)
        self._streams: list[RawIOBase] = []
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(cast("IO[bytes]", stream).fileno(), False)
            self._streams.append(cast("RawIOBase", stream))
        self._input, self._output, self._errors = self._streams
        loop.register(self._output, self._read)
        loop.register(self._errors, self._read_errors)

    @property
    def is_over(self) -> bool:
        """Nothing comes from it any more."""
        return self.state in {HostState.ENDED, HostState.LOST}

    @property
    def is_starting(self) -> bool:
        """Its launcher has not answered yet."""
        return self.state in {HostState.CONNECTING, HostState.STARTING}

    @property
    def is_hung_up(self) -> bool:
        """Its connection was closed from here."""
        return self._input.closed

    @property
    def hostname(self) -> str:
        """The name that the host has for itself, once that is known."""
        return self.name if self.hello is None else self.hello.hostname

    def give_up(self, why: str) -> None:
        """End a host that does not answer."""
        self._lose(LaunchError(f"host {self.name} {why}"))
        self._process.kill()
        self._close(self._output)
        self._on_message(self, None)

    def send(self, message: object) -> None:
        """Send a message; it is dropped if the host has ended."""
        if not self._input.closed:
            self._unsent += serialize(message)
            self._flush()

    def hang_up(self) -> None:
        """Close the connection: the watchdog kills what runs there."""
        if not self._input.closed:
            self._unsent.clear()
            with contextlib.suppress(KeyError):  # it is registered only while there is something to send
                self._loop.unregister(self._input)
            self._input.close()

    def kill(self) -> None:
        """Kill ssh, which does not end by itself."""
        self._process.kill()

    def close(self) -> None:
        """Release everything."""
        self.hang_up()
        for stream in (self._output, self._errors):
            self._close(stream)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
            return
        self._process.kill()
        self._process.wait()

    def _flush(self) -> None:
        if self._input.closed or self._is_flushing:  # a handler of signals sends while this function does
            return
        self._is_flushing = True
        try:
            while self._unsent:
                del self._unsent[: os.write(self._input.fileno(), self._unsent[:READ_BYTES])]
        except BlockingIOError:
            self._loop.register(self._input, None, self._flush)
            return
        except OSError:  # it has ended, which its output tells
            self._unsent.clear()
        finally:
            self._is_flushing = False
        with contextlib.suppress(KeyError):
            self._loop.unregister(self._input)

    def _read(self) -> None:
        if self._output.closed:
            return
        piece = self._output.read(READ_BYTES)
        if piece is None:
            return
        if not piece:
            self._end()
            return
        self._inbox += piece
        if self.hello is None and not self._read_hello():
            return
        self._on_message(self, Alive())  # whatever it is: a long message takes its time
        for message in pop_messages(self._inbox):
            if isinstance(message, HostEnded):
                self.ended = message
            self._on_message(self, message)

    def _read_hello(self) -> bool:
        """Look for the first line of the watchdog, and show what shells have printed before it."""
        start = self._inbox.find(HELLO_MARK)
        end = self._inbox.find(b"\n", start)
        if start < 0 or end < 0:
            if len(self._inbox) > _MOST_BEFORE:
                self.give_up(
                    f"cannot be used: what {self.command.program} starts there prints without an end, and is not "
                    "rankwise"
                )
            return False
        before, line = bytes(self._inbox[:start]), bytes(self._inbox[start:end])
        del self._inbox[: end + 1]
        if before:
            self._on_text(before.rstrip(b"\n") + b"\n")
        try:
            hello = Hello.of(line)
        except ValueError:
            hello = Hello(version="another", folder="?", hostname=self.name)
        self.hello = hello
        self.state = HostState.STARTING
        if hello.version != version():
            self.give_up(
                f"cannot be used: it has rankwise {hello.version or 'without a version'} in {hello.folder}, and this "
                f"launcher has {version() or 'one without a version'}; install the same one"
            )
            return False
        if hello.python != python_version():
            interpreter = interpreter_command("other_hosts.watchdog")[0]
            self.give_up(
                f"cannot be used: {interpreter} is Python {hello.python} there, and this launcher has Python "
                f"{python_version()}; hosts need the same one at the same path"
            )
            return False
        self._on_message(self, hello)
        return True

    def _read_errors(self) -> None:
        if self._errors.closed:
            return
        piece = self._errors.read(READ_BYTES)
        if piece is None:
            return
        if not piece:
            self._close(self._errors)
            return
        self._last = (self._last + piece)[-_LAST_BYTES:]
        if self.hello is not None:  # before, it is a part of the error
            self._on_text(piece)

    def _end(self) -> None:
        """Its output has ended: nothing runs there any more, or the connection is lost."""
        self._close(self._output)
        if not self._errors.closed and poll({self._errors.fileno(): READABLE}, 0.1):
            self._read_errors()
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_END_SECONDS)
        printed = self._last.decode(errors="replace")
        if self.ended is not None:
            self.state = HostState.ENDED
        elif self.hello is None:
            told = self._inbox[-_LAST_BYTES:].decode(errors="replace") + printed  # the first of a shell, instead
            self._lose(self.command.explain_start(1 if status is None else status, told))
        else:
            self._lose(LaunchError(self.command.explain_loss(status, printed)))
        self._on_message(self, None)

    def _lose(self, why: LaunchError) -> None:
        self.lost = why
        self.state = HostState.LOST
        self.hang_up()

    def _close(self, stream: RawIOBase) -> None:
        if not stream.closed:
            self._loop.unregister(stream)
            stream.close()


def _started(command: HostCommand) -> subprocess.Popen[bytes]:
    argv = command.argv()
    try:
        return subprocess.Popen(  # noqa: S603 - ssh, or this interpreter
            argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is sent to the launchers as a message
        )
    except OSError as error:
        raise LaunchError(
            f"host {command.name} cannot be used: {argv[0]} cannot be started: {error.strerror}; install OpenSSH's "
            "client, or name another with --ssh-command"
        ) from error
