"""Where anybody can connect: who does is let in, and sent away unless it says in time who it is.

Decided here: who may stay, and for how long. What visitors say, and who is known by it, is decided by whoever listens.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rankwise.errors import JoinError
from rankwise.rendezvous import LOOPBACK

# How long somebody who connected may take to say who it is, however it spends that time.
SECONDS_TO_GREET: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_PIECE_BYTES: Final = 65536
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True, eq=False)
class Visitor:
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


class Door:
    """Listening sockets, and the connections that came through them.

    Closed, it closes the connections that are still in its care, and not the listening sockets.
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
        self._selector = selectors.DefaultSelector()
        # In the order of arrival: those who have not said who they are, and those who have.
        self._strangers: dict[Visitor, None] = {}
        self._known: dict[Visitor, None] = {}
        self._sent_away: Counter[str] = Counter()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Door:  # noqa: PYI034 - nobody derives from it, and Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._selector.close()
        for visitor in (*self._strangers, *self._known):
            visitor.connection.close()

    def wait(self, seconds: float) -> list[Visitor]:
        """Wait for visitors, a second at most; return those who have sent something, or have left.

        Raises:
            JoinError: There are no file descriptors left for those who come.
        """
        heard = []
        for key, _ in self._selector.select(min(seconds, _LOOK_SECONDS)):
            if isinstance(key.data, Visitor):
                heard.append(key.data)
            elif isinstance(key.fileobj, socket.socket):
                self._let_in(key.fileobj)
        latest = time.monotonic() - SECONDS_TO_GREET
        for visitor in list(self._strangers):
            if visitor.since > latest:
                break
            self.send_away(visitor)
        return [visitor for visitor in heard if visitor in self._strangers or visitor in self._known]

    def know(self, visitor: Visitor) -> None:
        """Let somebody stay who has said who it is."""
        if visitor in self._strangers:
            del self._strangers[visitor]
            self._known[visitor] = None

    def send_away(self, visitor: Visitor) -> None:
        """Close a connection."""
        if visitor in self._strangers:
            self._sent_away[visitor.origin] += 1
        self.hand_over(visitor).close()

    def hand_over(self, visitor: Visitor) -> socket.socket:
        """Return a connection that is the caller's to close from now on."""
        self._selector.unregister(visitor.connection)
        self._strangers.pop(visitor, None)
        self._known.pop(visitor, None)
        return visitor.connection

    def strangers_text(self) -> str:
        """Return how many were sent away and where most came from, as a sentence; "" if nobody was."""
        if not self._sent_away:
            return ""
        (origin, _), *others = self._sent_away.most_common(2)
        count = self._sent_away.total()
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
            self._sent_away[origin] += 1
            connection.close()
            return
        visitor = Visitor(connection, time.monotonic(), origin)
        self._strangers[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _make_room(self, error: OSError) -> None:
        """Send away who has been silent for longest: a rank says at once who it is."""
        if not self._strangers:
            raise JoinError(
                f"no more ranks can connect: {error.strerror}, with {len(self._known)} of them connected; raise the "
                "limit of file descriptors (ulimit -n)"
            ) from error
        self.send_away(next(iter(self._strangers)))


def listen(port: int, *, one_host: bool) -> socket.socket:
    """Listen on a port, 0 for any: on loopback for ranks of one host, else on all interfaces."""
    if one_host:
        return socket.create_server((LOOPBACK, port), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)
