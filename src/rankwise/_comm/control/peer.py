"""A non-blocking connection to another member of a group: its received frames, and the bytes that wait to be sent."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Final

from rankwise._comm.control.protocol import Frame, FrameKind, is_data_next, pop_data_header, pop_frame

_READ_BYTES: Final = 1 << 18
# The number of exchanges that a member may be ahead before its frames are left in the connection. Only a member that
# fails in each of them gets so far, since all others wait for this rank.
_MAX_EXCHANGES_AHEAD: Final = 1000

_CLOSED: Final = "is gone: its connection closed, so it was killed or exited without cleanup"


@dataclass(slots=True)
class Peer:
    """Another member.

    Attributes:
        rank: Its global rank.
        host: The name of its host; "" if all members are on this host.
        connection: The connection to it.
        inbox, outbox: The bytes received and not yet parsed, and the bytes not yet sent.
        frames: Its frames of exchanges that this rank has not finished, by sequence number.
        timeouts: The error messages of exchanges in which its timeout expired, by sequence number.
        first_sequence: The first exchange that this rank has not finished.
        is_partly_sent: A part of the announced data was sent, and a part was not.
        last_call: The last call it was seen in.
        lost_reason: The reason why it sends nothing more; "" while it is connected.
    """

    rank: int
    host: str
    connection: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    frames: dict[int, Frame] = field(default_factory=dict)
    timeouts: dict[int, str] = field(default_factory=dict)
    first_sequence: int = 0
    is_partly_sent: bool = False
    last_call: str = ""
    lost_reason: str = ""

    @property
    def name(self) -> str:
        """The rank and its host: "rank 3 on node2"."""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}"

    @property
    def name_and_last_call(self) -> str:
        """The rank, its host and its last call."""
        seen = f"last seen in {self.last_call}" if self.last_call else "not seen in any collective here"
        return f"{self.name}, {seen}"

    @property
    def is_sending_data(self) -> bool:
        """The next received bytes are data. It stays in the connection until `transfer` asks for it."""
        return is_data_next(self.inbox)

    @property
    def is_too_far_ahead(self) -> bool:
        """So many of its frames are stored that the following ones stay in the connection."""
        return len(self.frames) >= _MAX_EXCHANGES_AHEAD

    def post(self, data: bytes | bytearray) -> None:
        """Send bytes without waiting; those that the connection cannot take now are kept in the outbox."""
        if self.lost_reason:
            return
        if self.outbox:
            self.outbox += data
            return
        sent = self.send(data)
        if sent < len(data):
            self.outbox += memoryview(data)[sent:]

    def flush(self) -> None:
        """Send bytes of the outbox without waiting."""
        data, self.outbox = self.outbox, bytearray()
        self.post(data)

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as many bytes as the connection can take now, and return their number."""
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # The peer will never read it. This is no loss yet: its last frames, maybe with the reason for its end, may
            # still be unread in the connection, so only `receive` marks it as lost.
            return len(data)

    def send_data(self, data: memoryview) -> int:
        """Send bytes of announced data, once the outbox is empty, and return their number."""
        if self.outbox:
            self.flush()
        if self.outbox or self.lost_reason:
            return 0
        sent = self.send(data)
        self.is_partly_sent = sent < len(data)
        return sent

    def receive(self) -> None:
        """Read all received frames without waiting. Data is left in the connection."""
        while not (self.lost_reason or self.is_sending_data or self.is_too_far_ahead):
            try:
                received = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            self.inbox += received
            self.parse_inbox()
            if not received:
                self.mark_lost(_CLOSED)

    def start_data(self) -> bool:
        """Return whether the peer has begun to send data; if so, remove the header of the data."""
        self.receive()
        started = self.is_sending_data
        if started:
            pop_data_header(self.inbox)
        return started

    def receive_into(self, buffer: memoryview) -> int:
        """Fill a buffer with data of the peer without waiting, and return the number of bytes received."""
        taken = min(len(self.inbox), len(buffer))
        if taken:
            buffer[:taken] = self.inbox[:taken]
            del self.inbox[:taken]
            return taken
        try:
            received = self.connection.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if not received:
            self.mark_lost(_CLOSED)
        return received

    def parse_inbox(self) -> None:
        """Store the frames that were received."""
        while (frame := pop_frame(self.inbox)) is not None:
            if frame.kind is FrameKind.LEFT:
                self.mark_lost(frame.call)
            elif frame.kind is FrameKind.TIMED_OUT:
                self.timeouts[frame.sequence] = frame.call
            else:
                self.last_call = frame.call
                # A frame of a finished exchange comes from a member that was late for an exchange that failed here.
                if frame.sequence >= self.first_sequence:
                    self.frames[frame.sequence] = frame

    def discard_before(self, sequence: int) -> None:
        """Discard the frames of exchanges before `sequence`, including those that have not arrived yet."""
        self.first_sequence = sequence
        for old in [number for number in self.frames if number < sequence]:
            del self.frames[old]
        for old in [number for number in self.timeouts if number < sequence]:
            del self.timeouts[old]

    def mark_lost(self, reason: str) -> None:
        """Record the reason why the peer sends nothing more; the first one counts."""
        self.lost_reason = self.lost_reason or reason
        self.outbox.clear()
