"""Accepts connections from any process, and rejects clients that do not identify themselves in time.

Decided here: how long a connection may stay open. The protocol, and which message identifies a client, are the
caller's.
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
from typing import Final, Self

from rankwise._net.addresses import LOOPBACK
from rankwise._net.polling import EventLoop
from rankwise.errors import JoinError

# How long a client may take to identify itself, whether it is silent or sends bytes one at a time.
IDENTIFY_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0
_PIECE_BYTES: Final = 65536
_MOST_AT_ONCE: Final = 64
# How long a rank may take to identify itself where there are too few descriptors.
_AT_ONCE_SECONDS: Final = 0.25
_RESOURCE_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True, eq=False, weakref_slot=True)
class Client:
    """A connection, and the bytes received over it that are not processed yet.

    Attributes:
        since: When it connected, on the monotonic clock.
        origin: Its address, for messages.
    """

    connection: socket.socket
    since: float
    origin: str
    received: bytearray = field(default_factory=bytearray)

    def read(self, most: int = _PIECE_BYTES) -> bool:
        """Receive at most so many bytes; return False if the client has disconnected."""
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

    A context manager: on exit it closes its connections, but not the listening sockets.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        admits: Callable[[socket.socket], bool] = lambda _: True,
        loop: EventLoop | None = None,
        run: Callable[[Callable[[], object]], object] = lambda callback: callback(),
    ) -> None:
        """Listen.

        Args:
            listeners: The sockets that listen.
            admits: Returns whether to accept a new connection at all.
            loop: The event loop of the caller, who closes it before this; None for one of its own, and `wait`.
            run: Calls what is to be done after an event; the caller may call `take` after that.
        """
        self._admits = admits
        self._run = run
        self._loop = EventLoop() if loop is None else loop
        self._ready: list[Client] = []
        # In the order of arrival, so the first has waited longest.
        self._unidentified: dict[Client, None] = {}
        self._identified: dict[Client, None] = {}
        self._rejected: Counter[str] = Counter()
        self._shortage: OSError | None = None
        for listener in listeners:
            listener.setblocking(False)
            self._loop.register(listener, partial(self._run, partial(self._accept, listener)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.close()
        self.close()

    def close(self) -> None:
        """Close the connections, after the event loop."""
        for client in (*self._unidentified, *self._identified):
            client.connection.close()

    def wait(self, seconds: float) -> list[Client]:
        """Wait at most a second; return the clients that have sent data, or have disconnected.

        Raises:
            JoinError: No file descriptors are left for new connections.
        """
        self._loop.run_once(min(seconds, _POLL_SECONDS))
        return self.take()

    def take(self) -> list[Client]:
        """Return the clients that have sent data, or have disconnected, since the last call. Does not wait.

        Raises:
            JoinError: No file descriptors are left for new connections.
        """
        ready = self._ready.copy()
        self._ready.clear()
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            self._free_descriptor(shortage, ready)
        latest = time.monotonic() - IDENTIFY_SECONDS
        while self._unidentified and (first := next(iter(self._unidentified))).since <= latest:
            self.reject(first)
        return [client for client in ready if client in self._unidentified or client in self._identified]

    def identify(self, client: Client) -> None:
        """Keep the connection of a client that has identified itself."""
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
        """Return a sentence with the number of rejected connections and their most frequent origin; "" if none."""
        if not self._rejected:
            return ""
        (origin, _), *others = self._rejected.most_common(2)
        count = self._rejected.total()
        were = "connection was closed that was" if count == 1 else "connections were closed that were"
        return f" {count} {were} no rank's, from {origin}{' and others' if others else ''}."

    def _accept(self, listener: socket.socket) -> None:
        """Accept some of the connections that wait: a rank may be behind hundreds of others."""
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError as error:
                if error.errno in _RESOURCE_ERRORS:
                    self._shortage = error
                return  # none waits, or the client has disconnected already
            self._keep(connection, address)

    def _keep(self, connection: socket.socket, address: object) -> None:
        connection.setblocking(False)
        origin = address[0] if isinstance(address, tuple) else "this host"
        if not self._admits(connection):
            self._rejected[origin] += 1
            connection.close()
            return
        client = Client(connection, time.monotonic(), origin)
        self._unidentified[client] = None
        self._loop.register(connection, partial(self._run, partial(self._ready.append, client)))

    def _free_descriptor(self, error: OSError, ready: Sequence[Client]) -> None:
        """Reject the client that has waited longest without identifying itself: a rank does so at once."""
        if not self._unidentified:
            raise JoinError(
                f"no more ranks can connect: {error.strerror}, with {len(self._identified)} of them connected; raise "
                "the limit of file descriptors (ulimit -n)"
            ) from error
        first = next(iter(self._unidentified))
        if time.monotonic() - first.since > _AT_ONCE_SECONDS and first not in ready:
            self.reject(first)


def listen(port: int, *, one_host: bool) -> socket.socket:
    """Listen on a port, 0 for any: on loopback for ranks of one host, else on all interfaces."""
    if one_host:
        return socket.create_server((LOOPBACK, port), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)
