"""A non-blocking connection to another rank, which all groups of the session share.

It carries messages: frames, and pieces of data, each whole and with the id of its group. What is read and not wanted
yet is kept by group: frames in an `Inbox` until this rank comes to their exchanges, data in a `_Stream` for the thread
that will ask for it. So no group waits for another one, and a rank that leaves a group in the middle of its data only
sends no more of it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from rankwise._comm.control.exchange import Inbox
from rankwise._comm.control.protocol import (
    HEADER,
    Frame,
    FrameKind,
    data_header,
    pop_data_header,
    pop_frame,
)

_READ_BYTES: Final = 1 << 18
# The longest piece of data in one message. What a connection does not take at once of a piece is copied.
_PIECE_BYTES: Final = 1 << 18
CLOSED: Final = "is gone: its connection closed, so it was killed or exited without cleanup"


class _Stream:
    """The data of one group that a peer sends, in the order in which the thread of the group asks for it.

    Attributes:
        unfilled: The rest of the buffer that it fills.
        kept: What was read before it was asked for.
    """

    def __init__(self) -> None:
        self.unfilled = memoryview(bytearray())
        self.kept = bytearray()

    def fill(self, buffer: memoryview) -> None:
        """Fill a buffer, after the last one is full: with what was kept, and then with what arrives."""
        kept, self.kept = self.kept, bytearray()
        self.unfilled = buffer
        self.add(kept)

    def add(self, data: bytearray) -> None:
        """Add data that has arrived."""
        count = min(len(data), len(self.unfilled))
        self.unfilled[:count] = data[:count]
        self.unfilled = self.unfilled[count:]
        self.kept += data[count:]


class Peer:
    """Another rank.

    Attributes:
        rank: Its global rank.
        host: The name of its host; "" if all ranks are on this host.
        connection: The connection to it.
        lost_reason: The reason why it sends nothing more; "" while it is connected.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        connection: socket.socket,
        *,
        expects_data: Callable[[int], bool],
        on_read: Callable[[], object],
    ) -> None:
        """Take over a connection.

        Args:
            rank: The global rank of the peer.
            host: The name of its host; "" if all ranks are on this host.
            connection: The connection.
            expects_data: Returns whether data of a group is, or will be, received by the thread that uses the group;
                other data is discarded, such as that of a group that this rank has left.
            on_read: Called when something has been read, which may be for another thread.
        """
        connection.setblocking(False)
        self.rank = rank
        self.host = host
        self.connection = connection
        self.lost_reason = ""
        self._expects_data = expects_data
        self._on_read = on_read
        self._lock = threading.RLock()
        self._received = bytearray()
        self._outbox = bytearray()
        self._inboxes: dict[int, Inbox] = {}
        self._streams: dict[int, _Stream] = {}
        # The groups left by this rank of which the peer has not reported yet that it has left them.
        self._left_groups: set[int] = set()
        # The group of the data that arrives now, or arrived last, and the length of the rest of its piece.
        self._incoming, self._rest = -1, 0

    @property
    def name(self) -> str:
        """The rank and its host: "rank 3 on node2"."""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}"

    @property
    def num_unsent(self) -> int:
        """The number of bytes that wait to be sent."""
        return len(self._outbox)

    def inbox(self, group: int) -> Inbox:
        """Return the frames of a group."""
        return self._inboxes.setdefault(group, Inbox())

    def forget(self, group: int) -> None:
        """Discard the frames and data of a group that this rank has left, also what has not arrived yet."""
        with self._lock:
            inbox = self._inboxes.pop(group, None)
            self._streams.pop(group, None)
            if not self.lost_reason and (inbox is None or not inbox.left):
                self._left_groups.add(group)

    def post(self, frame: Frame) -> None:
        """Send a frame without waiting; bytes that the connection cannot take now are kept."""
        with self._lock:
            if not self.lost_reason:
                self._outbox += frame.encode()
                self.flush()

    def flush(self) -> None:
        """Send bytes that were kept, without waiting."""
        with self._lock:
            if self._outbox:
                self._send(self._outbox)

    def send_data(self, group: int, data: memoryview) -> int:
        """Send bytes of data of a group without waiting, once all before them are sent; return how many are taken."""
        with self._lock:
            self.flush()
            if self._outbox or self.lost_reason or not data:
                return 0
            piece = data[:_PIECE_BYTES]
            self._send(data_header(group, len(piece)), piece)
            return len(piece)

    # A thread may wait for data of one group behind data of another group, whose thread waits for another rank, which
    # waits for the first thread. So a thread that asks for data reads on, and keeps what is not its own. But a thread
    # that waits for frames leaves data in the connection: the thread of the data has agreed on the call, and comes.
    def receive(self, *, for_data: bool = False) -> None:
        """Read what has arrived, without waiting; unless it is for data, up to data that nobody asks for yet."""
        with self._lock:
            has_read = False
            while not self.lost_reason and (for_data or not self._is_full()) and self._read():
                has_read = True
                self._parse()
            if has_read:
                self._on_read()

    def fill(self, group: int, buffer: memoryview) -> None:
        """Fill a buffer with the next data of a group; one at a time."""
        with self._lock:
            self._stream(group).fill(buffer)

    def num_unfilled(self, group: int) -> int:
        """Return the length of the rest of the buffer of a group."""
        return len(self._stream(group).unfilled)

    @property
    def is_readable(self) -> bool:
        """What arrives would be read now."""
        return not self.lost_reason and not self._is_full()

    def mark_lost(self, reason: str) -> None:
        """Record the reason why the peer sends nothing more; the first one counts."""
        self.lost_reason = self.lost_reason or reason
        self._outbox.clear()

    def _is_full(self) -> bool:
        """Return whether data comes next that a thread will ask for, and has not yet."""
        return self._rest > 0 and self._expects_data(self._incoming) and not self._stream(self._incoming).unfilled

    def _stream(self, group: int) -> _Stream:
        return self._streams.setdefault(group, _Stream())

    def _send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send what the connection takes now, and keep the rest: the outbox itself, or, while it is empty, a piece."""
        try:
            try:
                sent = self.connection.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            except OSError:
                # The peer will never read it. This is no loss yet: its last frames, maybe with the reason for its end,
                # may still be unread in the connection, so only `receive` marks it as lost.
                sent = sum(map(len, parts))
            if parts[0] is self._outbox:
                del self._outbox[:sent]
                return
            for part in parts:
                self._outbox += part[sent:]
                sent = max(0, sent - len(part))
        except BaseException:  # an interrupt: nobody knows how much was sent
            self._break()
            raise

    def _break(self) -> None:
        """End the connection: the next bytes on it have no known meaning."""
        self.mark_lost(CLOSED)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> bool:
        """Read a part of what has arrived, or the end of the connection; False if nothing has arrived."""
        stream = self._stream(self._incoming)
        count = 0
        try:
            if self._rest and stream.unfilled:  # data that a thread waits for is read into its buffer at once
                count = self.connection.recv_into(stream.unfilled[: self._rest])
                stream.unfilled = stream.unfilled[count:]
                self._rest -= count
            else:
                # After a piece of such data probably comes the header of the next one, and then that into the buffer.
                received = self.connection.recv(HEADER.size if stream.unfilled else _READ_BYTES)
                count = len(received)
                self._received += received
        except BlockingIOError:
            return False
        except OSError:
            pass
        except BaseException:
            self._break()
            raise
        if not count:
            self.mark_lost(CLOSED)
        return True

    def _parse(self) -> None:
        """Store the frames and the data that were received."""
        while self._received:
            if self._rest:
                data = self._received[: self._rest]
                del self._received[: self._rest]
                self._rest -= len(data)
                if self._expects_data(self._incoming):
                    self._stream(self._incoming).add(data)
            elif (announced := pop_data_header(self._received)) is not None:
                self._incoming, self._rest = announced
            elif (frame := pop_frame(self._received)) is None:
                return
            elif frame.group not in self._left_groups:
                self.inbox(frame.group).store(frame)
            elif frame.kind is FrameKind.LEFT:
                self._left_groups.remove(frame.group)
