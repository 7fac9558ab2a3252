"""Rank processes under one fork server: the part that `launch` and the pytest plugin share.

Decided here: how ranks are started, how messages are exchanged with them, and how their ends are recorded. When to
stop ranks, where their output goes and how their messages are used is left to the owner.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from rankwise._launch.forkserver.client import ForkServer, receive_available
from rankwise._launch.forkserver.ipc import ServerEvent, StartRequest, pop_messages, serialize
from rankwise._launch.reaper import LAUNCH_ID, SECONDS_TO_END
from rankwise._launch.resource_limits import advice_for
from rankwise._net.polling import EventLoop
from rankwise.errors import LaunchError


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A rank that was started.

    Attributes:
        connection: The socket to the rank, non-blocking; set when it is started.
        unsent: The part of the start request that is not sent yet.
        inbox: Received bytes that are not a whole message yet.
        pid: The process id; 0 until the process exists.
        exitcode: The exit code of the process; None while it runs.
        ended_ns: When the process ended, on the host's monotonic clock.
    """

    connection: socket.socket = field(init=False)
    unsent: memoryview = field(init=False, default=memoryview(b""))
    inbox: bytearray = field(init=False, default_factory=bytearray)
    pid: int = 0
    exitcode: int | None = None
    ended_ns: int = 0

    @property
    def is_running(self) -> bool:
        """The process has not ended."""
        return self.exitcode is None

    @abstractmethod
    def handle(self, message: Any) -> None:  # noqa: ANN401 - each subclass knows the messages of its ranks
        """Process a message from the rank."""


R = TypeVar("R", bound=RankProcess)


class RankProcesses(Generic[R]):
    """The ranks of one fork server, and an event loop that receives from both.

    Attributes:
        ranks: The started ranks, by number.
        has_swept: The fork server has killed all descendants of the ranks since the last `clear`.
        left: The processes that SIGKILL did not end then.
    """

    def __init__(self, server: ForkServer, loop: EventLoop) -> None:
        self.ranks: dict[int, R] = {}
        self.has_swept = False
        self.left: list[int] = []
        self._server = server
        self._loop = loop
        loop.register(server.control, self._receive_events)

    def start(self, number: int, rank: R, request: StartRequest, descriptors: Sequence[int]) -> None:
        """Start a rank. Its `pid` is set once the loop has received the fork server's answer.

        Args:
            number: The number that identifies the rank.
            rank: The object for the new rank.
            request: The start request.
            descriptors: The rank's standard output, its standard error, and the descriptor for stacks after a crash.
        """
        rank.connection, remote = socket.socketpair()
        rank.connection.setblocking(False)
        with remote:
            marked = replace(request, environ={**request.environ, LAUNCH_ID: self._server.launch_id})
            rank.unsent = memoryview(serialize(marked))
            self._loop.register(rank.connection, partial(self._receive, rank), partial(self._send, rank))
            self.ranks[number] = rank
            self._server.start(number, [remote.fileno(), *descriptors])

    def running(self) -> list[int]:
        """Return the numbers of the ranks whose processes have not ended."""
        return [number for number, rank in self.ranks.items() if rank.is_running]

    def signal(self, number: int, signum: int, *, to_group: bool = False) -> None:
        """Send a signal to a rank; with `to_group`, to its process group."""
        self._server.signal(number, signum, to_group=to_group)

    def sweep(self, *, keeps_services: bool = False) -> None:
        """Kill all processes that are left of the ranks, and wait until that is done.

        Args:
            keeps_services: Those in sessions of their own are left.
        """
        self.has_swept = False
        self.left.clear()
        self._server.sweep(keeps_services=keeps_services)
        self._loop.run_until(lambda: self.has_swept, time.monotonic() + SECONDS_TO_END)

    def clear(self) -> None:
        """Forget the ranks, which have ended."""
        self.disconnect()
        self.ranks.clear()
        self.has_swept = False

    def disconnect(self) -> None:
        """Close the connections to the ranks."""
        for rank in self.ranks.values():
            self._disconnect(rank)

    def close(self) -> None:
        """Kill everything at once, the fork server included."""
        self._server.close()
        self.disconnect()

    def _disconnect(self, rank: R) -> None:
        if rank.connection.fileno() >= 0:
            self._loop.unregister(rank.connection)
            rank.connection.close()
            rank.unsent = memoryview(b"")

    def _send(self, rank: R) -> None:
        if rank.connection.fileno() < 0:
            return  # closed by a callback that ran after the same wait
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.unsent = rank.unsent[rank.connection.send(rank.unsent) :]
                if rank.unsent:
                    return
            rank.unsent = memoryview(b"")
            self._loop.register(rank.connection, partial(self._receive, rank))

    def _receive(self, rank: R) -> None:
        if rank.connection.fileno() >= 0:  # else closed by a callback that ran after the same wait
            with contextlib.suppress(BlockingIOError):
                self._read(rank)

    def _read(self, rank: R) -> None:
        data = receive_available(rank.connection)
        if not data:
            self._disconnect(rank)
            return
        rank.inbox += data
        for message in pop_messages(rank.inbox):
            rank.handle(message)

    def _receive_events(self) -> None:
        for event, number, value, time_ns in self._server.receive_events():
            if event == ServerEvent.STARTED:
                self.ranks[number].pid = value
            elif event == ServerEvent.REFUSED:
                raise LaunchError(f"rank {number} cannot be started here: {os.strerror(value)}{advice_for(value)}")
            elif event == ServerEvent.SWEPT:
                self.has_swept = True
            elif event == ServerEvent.LEFT:
                self.left.append(value)
            else:
                self._record_end(self.ranks[number], value, time_ns)

    def _record_end(self, rank: R, exitcode: int, time_ns: int) -> None:
        # The event may overtake the rank's last messages, which are in the socket already: the exit code alone would
        # hide what the rank raised.
        with contextlib.suppress(BlockingIOError):
            while rank.connection.fileno() >= 0:
                self._read(rank)
        rank.exitcode, rank.ended_ns = exitcode, time_ns
