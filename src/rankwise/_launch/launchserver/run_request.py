"""The protocol between a launch server and its clients.

A client sends one request. The answer to a `RunRequest` is ACCEPTED or STALE; after ACCEPTED the client sends the
numbers of signals for the process that runs, a byte each, and the last answer is ENDED. The process is killed when the
client closes the connection before that. The answer to `Query` and `Stop` is a `ServerState`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from rankwise._launch.forkserver.ipc import pop_messages, serialize

# An answer and its value.
ANSWER: Final = struct.Struct("<Bi")
_STREAMS: Final = 3


class Answer(IntEnum):
    """An answer to a RunRequest."""

    ACCEPTED = 0  # a process runs; the value is its id
    STALE = (
        1  # a file that the server has imported has changed: it has removed its socket, and starts no more processes
    )
    ENDED = 2  # the process has ended; the value is its exit code, negative for a signal
    REFUSED = 3  # the host has no resources for a process; the value is the errno


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The request to run a function in a fork of the server, with the streams and the state of the client.

    Attributes:
        target: The function, as "module:function"; it returns the exit status.
        call: Its arguments after the first one, pickled.
        argv: The client's `sys.argv`.
        search_path: The client's `sys.path`.
        environ, folder, umask: The client's environment, working directory and file mode creation mask.
        streams: Which of the standard streams the client has; their descriptors are attached.
        ignored, blocked: The signals that the client had ignored and blocked.
    """

    target: str
    call: bytes
    argv: Sequence[str]
    search_path: Sequence[str]
    environ: dict[str, str]
    folder: str
    umask: int
    streams: Sequence[int]
    ignored: Sequence[int]
    blocked: Sequence[int]


@dataclass(frozen=True, slots=True)
class Query:
    """The request for the state of the server."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The request to end: at once, or when the last of its processes has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The state of a server.

    Attributes:
        pid: Its process id.
        executable: Its interpreter.
        modules: The modules that it has imported after torch.
        age: The seconds since its start.
        idle: The seconds since the end of the last process; 0 while there is one.
        running: The number of processes that it has forked and that have not ended.
        is_stopping: It starts no more processes.
    """

    pid: int
    executable: str
    modules: Sequence[str]
    age: float
    idle: float
    running: int
    is_stopping: bool


def send_request(connection: socket.socket, request: RunRequest | Query | Stop) -> None:
    """Send a request, and the descriptors of the standard streams that it names."""
    data = memoryview(serialize(request))
    streams = request.streams if isinstance(request, RunRequest) else ()
    sent = socket.send_fds(connection, [data[:1]], list(streams)) if streams else 0
    connection.sendall(data[sent:])


def receive_request(connection: socket.socket) -> tuple[Any, list[int]]:
    """Receive a request, and the attached descriptors.

    Raises:
        EOFError: The connection was closed before.
    """
    inbox, descriptors = bytearray(), list[int]()
    while not (requests := pop_messages(inbox)):
        data, received, *_ = socket.recv_fds(connection, 1 << 20, _STREAMS)
        descriptors += received
        if not data:
            for descriptor in descriptors:
                os.close(descriptor)
            raise EOFError
        inbox += data
    return requests[0], descriptors


def receive_answer(connection: socket.socket) -> tuple[Answer, int] | None:
    """Receive an answer and its value; None if the server has ended."""
    data = b""
    while len(data) < ANSWER.size:
        try:
            piece = connection.recv(ANSWER.size - len(data))
        except ConnectionResetError:
            piece = b""
        if not piece:
            return None
        data += piece
    answer, value = ANSWER.unpack(data)
    return Answer(answer), value
