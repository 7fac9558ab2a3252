"""The protocols between the launcher, the fork server and the ranks.

The launcher sends commands to the fork server and receives events, as messages of a fixed size. The launcher and a
rank exchange pickled values, each after a header with its length.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, Final

from rankwise.errors import RankFailure

# Command or event, rank, value, time in nanoseconds.
CONTROL_MESSAGE: Final = struct.Struct("<BIiq")
_HEADER: Final = struct.Struct("<Q")
# A rank's connection, standard output, standard error, and the file for its stacks after a crash.
DESCRIPTORS: Final = 4
READ_BYTES: Final = 1 << 16


class ServerCommand(IntEnum):
    """A command from the launcher to the fork server."""

    START = 0  # start a rank; its descriptors are attached
    SIGNAL = 1  # send a signal to a rank
    SWEEP = 2  # kill all processes that are left of the ranks
    SIGNAL_GROUP = 3  # send a signal to the process group of a rank, as a terminal does


class ServerEvent(IntEnum):
    """An event that the fork server reports to the launcher."""

    STARTED = 0  # a rank was started; the value is its process id
    REFUSED = 1  # a rank could not be started; the value is the errno
    ENDED = 2  # a rank has ended; the value is its exit code
    SWEPT = 3  # a SWEEP is done
    IMPORTING = 4  # a module is imported now; its name follows, of as many bytes as the value, and "" at the end
    NOT_PRELOADED = 5  # ranks have to import a module; its name and the reason follow in the same way
    LEFT = 6  # SIGKILL has not ended a process during a SWEEP; the value is its process id


TEXT_EVENTS: Final = frozenset({ServerEvent.IMPORTING, ServerEvent.NOT_PRELOADED})


class TargetKind(Enum):
    """A kind of target that a rank can run."""

    SCRIPT = auto()
    MODULE = auto()
    PROGRAM = auto()  # an executable, which replaces the rank's process image
    FUNCTION = auto()
    # A function that gets, as its first arguments, the rank's connection and the descriptor for stacks of threads.
    FUNCTION_WITH_CONNECTION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a rank runs.

    Attributes:
        kind: The kind of target.
        argv: The script, module or program and its arguments; for a function, the caller's `sys.argv`.
        call: For a function: a pickled `FunctionCall`.
        source: The source of a script that can be read once only, such as a pipe; None for a file.
    """

    kind: TargetKind
    argv: tuple[str, ...] = ()
    call: bytes = b""
    source: bytes | None = None

    @property
    def is_function(self) -> bool:
        """It is a function of the caller."""
        return self.kind is TargetKind.FUNCTION


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The first message to a rank: its environment and its target.

    Attributes:
        environ: Its whole environment.
        target: Its target.
        has_stdin: It has the launcher's standard input; else it reads end of file.
        timeouts: The path of the launcher's `TimeoutPause`; "" for none.
        can_debug: `breakpoint()` gets the launcher's terminal.
        debug: A debugger stops at the first line of the target, and where an exception has ended it.
        debugpy: It waits for a client of debugpy first.
    """

    environ: dict[str, str] = field(repr=False)
    target: Target
    has_stdin: bool = True
    timeouts: str = ""
    can_debug: bool = False
    debug: bool = False
    debugpy: bool = False


@dataclass(frozen=True, slots=True)
class TerminalRequest:
    """A rank wants the launcher's terminal for a debugger, or returns it. A byte answers, with its descriptor."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """A rank leaves its session with an error that is its own, which it raises next.

    Attributes:
        text: The message of the rank.
        error: The error and its location, which may be the same in other ranks.
    """

    text: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """The result of a rank's target. There is none if a signal or `os._exit` ended the process.

    Attributes:
        value: The return value of the function, pickled; b"" if there is none.
        error: The exception, pickled; b"" if it cannot be pickled, or nothing was raised.
        failure: The exception as the report shows it; None if nothing was raised.
        status: The exit status of the process, which is about to end.
        consequence: The exception is a consequence of another rank's end.
        time_ns: When the target ended, on the host's monotonic clock.
    """

    value: bytes = b""
    error: bytes = b""
    failure: RankFailure | None = None
    status: int = 0
    consequence: bool = False
    time_ns: int


def serialize(value: object) -> bytes:
    """Return a message between the launcher and a rank: a header and the pickled value."""
    data = pickle.dumps(value)
    return _HEADER.pack(len(data)) + data


def pop_messages(inbox: bytearray) -> list[Any]:
    """Remove the whole messages from the received bytes, and return their values."""
    values, size = [], 0
    for start, size in _whole_values(inbox):
        with memoryview(inbox) as view, view[start:size] as value:
            values.append(pickle.loads(value))
    del inbox[:size]
    return values


def whole_messages(inbox: bytearray) -> int:
    """Return how many of the received bytes are whole messages."""
    return max((end for _, end in _whole_values(inbox)), default=0)


def _whole_values(inbox: bytearray) -> Iterator[tuple[int, int]]:
    """Yield where the value of each whole message begins, and where it and the message end."""
    end = 0
    while len(inbox) >= (start := end + _HEADER.size):
        (length,) = _HEADER.unpack_from(inbox, end)
        end = start + length
        if len(inbox) < end:
            return
        yield start, end


def receive_message(connection: socket.socket) -> Any:  # noqa: ANN401 - any value
    """Receive one message, and return its value. Blocks until all of it has arrived.

    Raises:
        EOFError: The connection was closed before.
    """
    (length,) = _HEADER.unpack(_receive_exactly(connection, _HEADER.size))
    return pickle.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
