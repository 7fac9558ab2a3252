"""What passes between the launcher, the fork server and the ranks: messages of one size; pickles, with their length."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, Final

MESSAGE: Final = struct.Struct("<BIiq")
LENGTH: Final = struct.Struct("<Q")
# A rank's connection, its output, its errors, and where it writes its stack when it crashes.
DESCRIPTORS: Final = 4
PIECE_BYTES: Final = 1 << 16


class Order(IntEnum):
    """What the launcher asks of the fork server."""

    START = 0  # a rank; its descriptors come with it
    SIGNAL = 1  # to a rank
    SWEEP = 2  # end whatever is left of ranks that have ended
    SIGNAL_ALL = 3  # to a rank and what it has started, as a terminal does


class Event(IntEnum):
    """What the fork server tells the launcher."""

    STARTED = 0  # a rank; the value is its process
    REFUSED = 1  # a rank; the value is the error's number
    ENDED = 2  # a rank; the value is its exit code, with the time
    SWEPT = 3


class TargetKind(Enum):
    """A kind of target that a rank can run."""

    SCRIPT = auto()
    MODULE = auto()
    PROGRAM = auto()  # an executable, which replaces the rank's process image
    FUNCTION = auto()
    # A function that gets, as its first arguments, the rank's connection and the descriptor for stacks of threads.
    FUNCTION_WITH_CONNECTION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """What a rank is to be.

    Attributes:
        environ: Its whole environment.
        kind: The kind of target.
        argv: The script, module or program and its arguments; the caller's, for a function.
        call: What a function is called with, and where: a `FunctionCall`, pickled.
    """

    environ: dict[str, str]
    kind: TargetKind
    argv: Sequence[str] = ()
    call: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """How what a rank ran has ended, if that was not by a signal or `os._exit`.

    Attributes:
        value: What the function returned, pickled; b"" if there is nothing.
        error: What was raised, pickled; b"" if that is not possible, or nothing was raised.
        raised: The class of what was raised and the first line of its message, "" if nothing was raised.
        traceback: The traceback as text, "" if nothing was raised.
        status: The exit status that the process is about to end with.
        consequence: What was raised tells of another rank's end.
        time_ns: When, on the host's monotonic clock.
    """

    value: bytes = b""
    error: bytes = b""
    raised: str = ""
    traceback: str = ""
    status: int = 0
    consequence: bool = False
    time_ns: int


def serialize(value: object) -> bytes:
    """Return a value as it travels between the launcher and a rank."""
    data = pickle.dumps(value)
    return LENGTH.pack(len(data)) + data


def pop_messages(inbox: bytearray) -> list[Any]:
    """Take the values out of what has come that are whole."""
    values = []
    while len(inbox) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(inbox)
        if len(inbox) < LENGTH.size + length:
            break
        with memoryview(inbox) as view, view[LENGTH.size : LENGTH.size + length] as value:
            values.append(pickle.loads(value))
        del inbox[: LENGTH.size + length]
    return values


def receive_message(connection: socket.socket) -> Any:  # noqa: ANN401 - what was sent
    """Return the next value, of which all has to come.

    Raises:
        EOFError: It did not.
    """
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
