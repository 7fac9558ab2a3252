"""A non-blocking connection to another rank, which all groups of the session share.

Frames and data of the groups follow each other on it. What is read and not wanted yet is kept by group: frames in an
`Inbox` until this rank comes to their exchanges, data as `KeptData` for the thread that will ask for it.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from rankwise._comm.control.exchange import Inbox
from rankwise._comm.control.protocol import (
    Frame,
    FrameKind,
    data_header,
    data_next,
    pop_data_header,
    pop_frame,
)

_READ_BYTES: Final = 1 << 18
_ZEROS: Final = memoryview(bytes(1 << 16))
# The byte that follows data: whether the sender has left its group in the middle of it, so that the rest is zeros.
_COMPLETE: Final = b"\0"
_ABANDONED: Final = b"\1"
CLOSED: Final = "is gone: its connection closed, so it was killed or exited without cleanup"


class AbandonedDataError(Exception):
    """The peer has left a group in the middle of its data."""


@dataclass(slots=True)
class _Transfer:
    """The data of one transfer.

    Attributes:
        data: The data that has been read, and not taken.
        is_complete: All of it has been read.
        is_abandoned: The peer has left the group in the middle of it.
    """

    data: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    is_abandoned: bool = False


class KeptData:
    """The data of one group, in the order of its transfers; false if there is none."""

    def __init__(self) -> None:
        self._transfers: deque[_Transfer] = deque()

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def add(self, data: memoryview, *, is_complete: bool, is_abandoned: bool) -> None:
        """Add data that follows the last one; if that was complete, it begins the next transfer.

        Args:
            data: The data.
            is_complete: It ends the transfer.
            is_abandoned: If so, whether the peer has left the group in the middle of it.
        """
        if not self._transfers or self._transfers[-1].is_complete:
            self._transfers.append(_Transfer())
        last = self._transfers[-1]
        last.data += data
        last.is_complete, last.is_abandoned = is_complete, is_complete and is_abandoned

    def take(self, buffer: memoryview) -> tuple[int, bool]:
        """Move data of the first transfer into a buffer.

        Returns:
            The number of bytes, one more at the end of the data; and whether that end was reached.

        Raises:
            AbandonedDataError: The peer has left the group in the middle of its data.
        """
        first = self._transfers[0]
        count = min(len(first.data), len(buffer))
        buffer[:count] = first.data[:count]
        del first.data[:count]
        if first.data:
            return count, False
        self._transfers.popleft()  # the rest of incomplete data is still in the connection
        if first.is_abandoned:
            raise AbandonedDataError
        return count + first.is_complete, first.is_complete


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
            on_read: Called when frames, or the end of the connection, have been read, which may be for another thread.
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
        # The groups left by this rank of which the peer has not reported yet that it has left them.
        self._left_groups: set[int] = set()
        # The group whose announced data is sent next, or partly sent; the length of the rest of it; whether the rest is
        # replaced by zeros, since this rank left the group in the middle of it; and frames that follow the data.
        self._sending: int | None = None
        self._rest = 0
        self._is_abandoned = False
        self._later = bytearray()
        # The group of the data that arrives next, and the length of the rest of it; and the byte that follows data.
        self._incoming: tuple[int, int] | None = None
        self._kept: dict[int, KeptData] = {}
        self._end = memoryview(bytearray(1))

    @property
    def name(self) -> str:
        """The rank and its host: "rank 3 on node2"."""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}"

    @property
    def num_unsent(self) -> int:
        """The number of bytes of frames that wait to be sent."""
        return len(self._outbox) + len(self._later)

    def inbox(self, group: int) -> Inbox:
        """Return the frames of a group."""
        return self._inboxes.setdefault(group, Inbox())

    def forget(self, group: int) -> None:
        """Discard the frames of a group that this rank has left, also those that have not arrived yet."""
        with self._lock:
            inbox = self._inboxes.pop(group, None)
            if not self.lost_reason and (inbox is None or not inbox.left):
                self._left_groups.add(group)

    def post(self, frame: Frame) -> None:
        """Send a frame without waiting; bytes that the connection cannot take now are kept."""
        with self._lock:
            if not self.lost_reason:
                (self._outbox if self._sending is None else self._later).extend(frame.encode())
                self.flush()

    def flush(self) -> None:
        """Send bytes that were kept, without waiting."""
        with self._lock:
            if self._outbox:
                del self._outbox[: self._send(self._outbox)]
            while self._is_abandoned and not self._outbox:
                zeros = _ZEROS[: self._rest - 1]
                if not self._send_rest(zeros, _ABANDONED if len(zeros) == self._rest - 1 else b""):
                    return

    def send_data(self, group: int, data: memoryview, *, is_begun: bool) -> int | None:
        """Send bytes of data of a group without waiting; the first call of a transfer announces it.

        Args:
            group: The id of the group.
            data: The rest of the data.
            is_begun: It was announced.

        Returns:
            The number of bytes sent; None if it could not be announced, since data of another group is being sent.
        """
        with self._lock:
            if not is_begun:
                self.flush()  # the rest of abandoned data
                if self._sending is not None:
                    return None
                self._outbox += data_header(group, len(data) + 1)
                self._sending, self._rest = group, len(data) + 1
            self.flush()
            if self._outbox or self.lost_reason:
                return 0
            return self._send_rest(data, _COMPLETE)

    def is_sending(self, group: int) -> bool:
        """Return whether announced data of a group is not sent completely."""
        return self._sending == group

    def abandon_data(self, group: int) -> None:
        """Replace the rest of data that was announced for a group by zeros, which are sent with what follows."""
        with self._lock:
            if self._sending == group:
                self._is_abandoned = True
                self.flush()

    def receive(self) -> None:
        """Read all received frames without waiting. Data that this rank expects is left in the connection."""
        with self._lock:
            while not self.lost_reason:
                self._parse()
                if self._incoming is not None:
                    if self._expects_data(self._incoming[0]):
                        return
                    if not self._receive_into(memoryview(bytearray(min(self._incoming[1] - 1, _READ_BYTES)))):
                        return
                elif not self._read():
                    return

    def receive_data(self, group: int, buffer: memoryview) -> tuple[int, bool]:
        """Fill a buffer with data of a group without waiting.

        Returns:
            The number of bytes received, one more at the end of the data; and whether that end was received.

        Raises:
            AbandonedDataError: The peer has left the group in the middle of its data.
        """
        with self._lock:
            self.receive()
            # Data of another group is kept: its thread may wait for another rank, which waits for this thread.
            while self._incoming is not None and self._incoming[0] != group and self._keep():
                self.receive()
            kept = self._kept.get(group)
            if kept:
                return kept.take(buffer)
            if self._incoming is None or self._incoming[0] != group:
                return 0, False
            received = self._receive_into(buffer)
            if received and self._incoming is None and self._end[0]:
                raise AbandonedDataError
            return received, bool(received) and self._incoming is None

    @property
    def is_readable(self) -> bool:
        """Frames that arrive would be read now."""
        return not self.lost_reason and (self._incoming is None or not self._expects_data(self._incoming[0]))

    @property
    def is_writable(self) -> bool:
        """Bytes that were kept would be sent now."""
        return not self.lost_reason and (bool(self._outbox) or self._is_abandoned)

    def mark_lost(self, reason: str) -> None:
        """Record the reason why the peer sends nothing more; the first one counts."""
        self.lost_reason = self.lost_reason or reason
        self._outbox.clear()
        self._later.clear()
        self._is_abandoned = False

    def _send(self, data: bytearray | memoryview, end: bytes = b"") -> int:
        try:
            return self.connection.sendmsg((data, end))
        except BlockingIOError:
            return 0
        except OSError:
            # The peer will never read it. This is no loss yet: its last frames, maybe with the reason for its end, may
            # still be unread in the connection, so only `receive` marks it as lost.
            return len(data) + len(end)

    def _send_rest(self, data: memoryview, end: bytes) -> int:
        """Send bytes of the announced data and those after it without waiting, and return their number."""
        try:
            sent = self._send(data, end)
            self._rest -= sent
        except BaseException:  # an interrupt: nobody knows how much was sent
            self._break()
            raise
        if sent and not self._rest:
            self._sending, self._is_abandoned = None, False
            self._outbox, self._later = self._later, bytearray()
            self.flush()
        return sent

    def _break(self) -> None:
        """End the connection: the next bytes on it have no known meaning."""
        self.mark_lost(CLOSED)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> bool:
        """Read what has arrived, and return whether anything has."""
        received = b""
        try:
            received = self.connection.recv(_READ_BYTES)
            self._received += received
        except BlockingIOError:
            return False
        except OSError:
            pass
        except BaseException:
            self._break()
            raise
        if not received:
            self._parse()
            self.mark_lost(CLOSED)
            self._on_read()
        return True

    def _parse(self) -> None:
        """Store the frames that were received, up to the next data."""
        has_read = False
        while self._incoming is None and (frame := pop_frame(self._received)) is not None:
            has_read = True
            if frame.group in self._left_groups:
                if frame.kind is FrameKind.LEFT:
                    self._left_groups.remove(frame.group)
            else:
                self.inbox(frame.group).store(frame)
        if self._incoming is None and (data := data_next(self._received)) is not None:
            pop_data_header(self._received)
            self._incoming = data
        if has_read:
            self._on_read()

    def _keep(self) -> bool:
        """Read data of another group, for the thread that will ask for it, and return whether any has arrived."""
        group, rest = self._incoming or (0, 0)
        piece = memoryview(bytearray(min(rest - 1, _READ_BYTES)))
        received = self._receive_into(piece)
        is_complete = bool(received) and self._incoming is None
        data = piece[: received - is_complete]
        self._kept.setdefault(group, KeptData()).add(data, is_complete=is_complete, is_abandoned=bool(self._end[0]))
        return bool(received)

    def _receive_into(self, buffer: memoryview) -> int:
        """Move data of the incoming transfer into a buffer, and read the byte after it; return the number of bytes."""
        group, rest = self._incoming or (0, 0)
        parts = (buffer, self._end) if len(buffer) == rest - 1 else (buffer,)
        received = 0
        if self._received:
            for part in parts:
                count = min(len(self._received), len(part))
                part[:count] = self._received[:count]
                del self._received[:count]
                received += count
        else:
            try:
                received = self.connection.recvmsg_into(parts)[0]
                self._incoming = (group, rest - received)
            except BlockingIOError:
                return 0
            except OSError:
                pass
            except BaseException:
                self._break()
                raise
            if not received:
                self.mark_lost(CLOSED)
                return 0
        self._incoming = (group, rest - received) if rest > received else None
        return received
