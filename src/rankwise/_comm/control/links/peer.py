"""The frames that this rank exchanges with another one, on a connection of their own that all groups share.

What is read is kept by group, in an `Inbox`, until this rank comes to the exchanges. What is posted before there is a
connection, or while it takes no more, is kept too.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from rankwise._comm.control.exchange import Inbox
from rankwise._comm.control.protocol import Frame, pop_frame

_READ_BYTES: Final = 1 << 18
CLOSED: Final = "is gone: its connection closed, so it was killed or exited without cleanup"


class Peer:
    """Another rank.

    Attributes:
        rank: Its global rank.
        host: The name of its host; "" if all ranks are on this host.
        connection: The connection to it; None before there is one.
        lost_reason: The reason why it sends nothing more; "" while it is connected, or may be.
    """

    def __init__(self, rank: int, host: str, *, on_read: Callable[[], object]) -> None:
        """Begin without a connection.

        Args:
            rank: The global rank of the peer.
            host: The name of its host; "" if all ranks are on this host.
            on_read: Called when something has been read, which may be for another thread.
        """
        self.rank = rank
        self.host = host
        self.connection: socket.socket | None = None
        self.lost_reason = ""
        self._on_read = on_read
        self._lock = threading.RLock()
        self._received = bytearray()
        self._outbox = bytearray()
        self._inboxes: dict[int, Inbox] = {}
        # The groups left by this rank of which the peer has not reported yet that it has left them.
        self._left_groups: set[int] = set()

    @property
    def name(self) -> str:
        """The rank and its host: "rank 3 on node2"."""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}"

    @property
    def is_connected(self) -> bool:
        """There is a connection, or was one."""
        return self.connection is not None

    @property
    def is_readable(self) -> bool:
        """More may arrive."""
        return self.is_connected and not self.lost_reason

    @property
    def num_unsent(self) -> int:
        """The number of bytes that wait to be sent."""
        return len(self._outbox)

    def attach(self, connection: socket.socket) -> None:
        """Take over the connection, which does not wait, and send what was posted before."""
        with self._lock:
            self.connection = connection
            self.flush()

    def inbox(self, group: int) -> Inbox:
        """Return the frames of a group."""
        return self._inboxes.setdefault(group, Inbox())

    def forget(self, group: int) -> None:
        """Discard the frames of a group that this rank has left, also those that have not arrived yet."""
        with self._lock:
            inbox = self._inboxes.pop(group, None)
            if not self.lost_reason and inbox is not None:
                self._left_groups.add(group)

    def post(self, frame: Frame) -> None:
        """Send a frame without waiting; bytes that cannot be sent now are kept."""
        with self._lock:
            if not self.lost_reason:
                self._outbox += frame.encode()
                self.flush()

    def flush(self) -> None:
        """Send bytes that were kept, without waiting."""
        with self._lock:
            if not self._outbox or self.connection is None:
                return
            try:
                try:
                    sent = self.connection.send(self._outbox)
                except BlockingIOError:
                    return
                except OSError:
                    # The peer will never read it. This is no loss yet: its last frames, maybe with the reason for its
                    # end, may still be unread in the connection, so only `receive` marks it as lost.
                    sent = len(self._outbox)
                del self._outbox[:sent]
            except BaseException:  # an interrupt: nobody knows how much was sent
                self._break()
                raise

    def receive(self) -> None:
        """Read what has arrived, without waiting."""
        with self._lock:
            has_read = False
            while self.is_readable and self._read():
                has_read = True
            if has_read:
                self._on_read()

    def mark_lost(self, reason: str) -> None:
        """Record the reason why the peer sends nothing more; the first one counts."""
        self.lost_reason = self.lost_reason or reason
        self._outbox.clear()

    def _break(self) -> None:
        """End the connection: the next bytes on it have no known meaning."""
        self.mark_lost(CLOSED)
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> bool:
        """Read a part of what has arrived, or the end of the connection; False if nothing has arrived."""
        received = b""
        try:
            if self.connection is not None:
                received = self.connection.recv(_READ_BYTES)
            self._received += received
            while (frame := pop_frame(self._received)) is not None:
                self._store(frame)
        except BlockingIOError:
            return False
        except OSError:
            pass
        except BaseException:
            self._break()
            raise
        if not received:
            self.mark_lost(CLOSED)
        return True

    def _store(self, frame: Frame) -> None:
        if frame.group not in self._left_groups:
            self.inbox(frame.group).store(frame)
