"""Accepting connections from anybody: a client that does not identify itself in time is rejected.

Decided here: how long a connection may stay. What clients send, and what identifies them, whoever listens decides.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final

from rankwise._net.addresses import LOOPBACK
from rankwise._net.polling import EventLoop
from rankwise.errors import JoinError

# How long somebody who connected may take to say who it is, however it spends that time.
IDENTIFY_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_PIECE_BYTES: Final = 65536
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True, eq=False)
class Client:
    """A connection, and what came over it that was not looked at yet.

    Attributes:
        since: When it connected, on the monotonic clock.
        origin: Where from, for people.
    """

    connection: socket.socket
    since: float
    origin: str
    received: bytearray = field(default_factory=bytearray)

    def read(self, most: int = _PIECE_BYTES) -> bool:
        """Take in what it has sent, so many bytes at most; False if it has left."""
        try:
            piece = self.connection.recv(most)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += piece
        return bool(piece)


class Acceptor:
    """Listening sockets, and the connections accepted from them.

    A context: at its end it closes the connections that it still has, and not the listening sockets.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], *, admits: Callable[[socket.socket], bool] = lambda _: True
    ) -> None:
        """Listen.

        Args:
            listeners: The sockets that listen.
            admits: Whether a new connection is let in at all.
        """
        self._admits = admits
        self._loop = EventLoop()
        self._ready: list[Client] = []
        # In the order of arrival.
        self._unidentified: dict[Client, None] = {}
        self._identified: dict[Client, None] = {}
        self._rejected: Counter[str] = Counter()
        for listener in listeners:
            listener.setblocking(False)
            self._loop.register(listener, partial(self._let_in, listener))

    def __enter__(self) -> Acceptor:  # noqa: PYI034 - nobody derives from it, and Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.close()
        for client in (*self._unidentified, *self._identified):
            client.connection.close()

    def wait(self, seconds: float) -> list[Client]:
        """Wait for clients, a second at most; return those that have sent something, or have hung up.

        Raises:
            JoinError: There are no file descriptors left for those who come.
        """
        self._ready.clear()
        self._loop.run_once(min(seconds, _LOOK_SECONDS))
        latest = time.monotonic() - IDENTIFY_SECONDS
        for client in list(self._unidentified):
            if client.since > latest:
                break
            self.reject(client)
        return [client for client in self._ready if client in self._unidentified or client in self._identified]

    def identify(self, client: Client) -> None:
        """Let a client stay that has identified itself."""
        if client in self._unidentified:
            del self._unidentified[client]
            self._identified[client] = None

    def reject(self, client: Client) -> None:
        """Close a connection."""
        if client in self._unidentified:
            self._rejected[client.origin] += 1
        self.release(client).close()

    def release(self, client: Client) -> socket.socket:
        """Return a connection that is the caller's to close from now on."""
        self._loop.unregister(client.connection)
        self._unidentified.pop(client, None)
        self._identified.pop(client, None)
        return client.connection

    def rejected_text(self) -> str:
        """Return how many were rejected and where most came from, as a sentence; "" if none was."""
        if not self._rejected:
            return ""
        (origin, _), *others = self._rejected.most_common(2)
        count = self._rejected.total()
        were = "connection was closed that was" if count == 1 else "connections were closed that were"
        return f" {count} {were} no rank's, from {origin}{' and others' if others else ''}."

    def _let_in(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room(error)
            return  # else it has left already
        connection.setblocking(False)
        origin = address[0] if isinstance(address, tuple) else "this host"
        if not self._admits(connection):
            self._rejected[origin] += 1
            connection.close()
            return
        client = Client(connection, time.monotonic(), origin)
        self._unidentified[client] = None
        self._loop.register(connection, partial(self._ready.append, client))

    def _make_room(self, error: OSError) -> None:
        """Reject the client that has been silent for longest: a rank identifies itself at once."""
        if not self._unidentified:
            raise JoinError(
                f"no more ranks can connect: {error.strerror}, with {len(self._identified)} of them connected; raise "
                "the limit of file descriptors (ulimit -n)"
            ) from error
        self.reject(next(iter(self._unidentified)))


def listen(port: int, *, one_host: bool) -> socket.socket:
    """Listen on a port, 0 for any: on loopback for ranks of one host, else on all interfaces."""
    if one_host:
        return socket.create_server((LOOPBACK, port), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)
