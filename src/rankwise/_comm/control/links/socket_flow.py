"""A transfer of data of one group over connections that carry nothing else: one for each pair of ranks and group.

Both sides know how many bytes follow, so there are no headers. A transfer that ends in the middle closes its
connections, since the next bytes on them have no known meaning; the next one makes others.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial

from rankwise._comm.control.flow import Flow
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import CLOSED


class SocketFlow(Flow):
    """Such a transfer, of one thread, which alone sends and receives; the event loop only wakes it up."""

    def __init__(
        self, links: Links, group: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]
    ) -> None:
        """Begin a transfer.

        Args:
            links: The connections.
            group: The id of the group.
            outgoing: The data for each rank.
            incoming: The buffer for the data of each rank.
        """
        self._links = links
        self._group = group
        self._unsent = {rank: data for rank, data in outgoing.items() if len(data)}
        self._unfilled = {rank: buffer for rank, buffer in incoming.items() if len(buffer)}
        self._connections: dict[int, socket.socket] = {}
        self._lost: set[int] = set()
        # The ranks without a connection; those to and from which data may move now; and those that wait for an event,
        # before they are registered and after that.
        self._unconnected = set(self.pending)
        self._ready: deque[int] = deque()
        self._blocked: set[int] = set()
        self._registered: set[int] = set()
        self._lock = threading.RLock()
        self._seen = 0
        for rank in list(self._unconnected):
            self._find(rank, again=True)

    @property
    def pending(self) -> AbstractSet[int]:
        return self._unsent.keys() | self._unfilled.keys()

    def lost(self, rank: int) -> str:
        """Return why the data of a rank cannot move any more; "" if it can."""
        if rank in self._lost:
            return CLOSED
        return self._links.connector.failure(rank, self._group) if rank in self._unconnected else ""

    def step(self) -> int:
        self._seen = self._links.loop.num_events
        for rank in list(self._unconnected):
            self._find(rank)
        moved = 0
        for _ in range(len(self._ready)):
            rank = self._ready.popleft()
            count = self._move(rank)
            moved += count
            if rank not in self._lost and (rank in self._unsent or rank in self._unfilled):
                if count:
                    self._ready.append(rank)
                else:
                    self._blocked.add(rank)
        return moved

    def wait(self, seconds: float) -> None:
        with self._lock:
            for rank in self._blocked:
                wake = partial(self._wake, rank)
                reads, writes = wake if rank in self._unfilled else None, wake if rank in self._unsent else None
                self._links.loop.register(self._connections[rank], reads, writes)
                self._registered.add(rank)
            self._blocked.clear()
        self._links.wait((), self._seen, seconds)

    def end(self) -> None:
        with self._lock:
            for rank in list(self._registered):
                self._unregister(rank)
        for rank, connection in self._connections.items():
            if rank in self._unsent or rank in self._unfilled:
                self._links.connector.drop(connection)
            else:
                self._links.connector.give_back(rank, self._group, connection)

    def _find(self, rank: int, *, again: bool = False) -> None:
        connection = self._links.connector.take(rank, self._group, again=again)
        if connection is not None:
            self._connections[rank] = connection
            self._unconnected.remove(rank)
            self._ready.append(rank)

    def _wake(self, rank: int) -> None:
        """Let the thread of the transfer move data again; in whichever thread has found the event."""
        with self._lock:
            if rank in self._registered:
                self._unregister(rank)
                self._ready.append(rank)

    def _unregister(self, rank: int) -> None:
        self._registered.remove(rank)
        self._links.loop.unregister(self._connections[rank])

    def _move(self, rank: int) -> int:
        """Send and receive what the connection takes and has now, and return the number of bytes."""
        connection, moved = self._connections[rank], 0
        try:
            if data := self._unsent.get(rank):
                with suppress(BlockingIOError):
                    moved += _advance(self._unsent, rank, connection.send(data))
            if buffer := self._unfilled.get(rank):
                with suppress(BlockingIOError):
                    count = connection.recv_into(buffer)
                    moved += _advance(self._unfilled, rank, count)
                    if not count:
                        self._lost.add(rank)
        except OSError:
            self._lost.add(rank)
        return moved


def _advance(rests: dict[int, memoryview], rank: int, count: int) -> int:
    """Remove as many bytes from the rest of a rank, and return their number."""
    if count == len(rests[rank]):
        del rests[rank]
    else:
        rests[rank] = rests[rank][count:]
    return count
