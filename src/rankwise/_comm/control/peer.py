"""One connection to another member of a group, which does not block: what came over it, and what waits to be sent."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Final

from rankwise._comm.control.protocol import Frame, FrameKind, is_bulk, take_bulk_head, take_frame

_PIECE_BYTES: Final = 1 << 18
# How many exchanges a member may be ahead, before it is left to wait. Only one that fails in each gets so far.
_MOST_AHEAD: Final = 1000

_ENDED: Final = "is gone: its connection closed, so it was killed or ended on the spot"


@dataclass(slots=True)
class Peer:
    """Another member.

    Attributes:
        rank: Its global rank.
        host: The name of its host; "" if that is this one, as it is of all members.
        connection: The connection to it.
        inbox, outbox: What was received and not yet read, and what could not be sent yet.
        frames: Its frames of exchanges that this rank has not finished, by sequence number.
        gave_up: The exchanges in which it waited too long, and what it said.
        first: The first exchange that this rank has not finished.
        midway: Some of the data that it was promised was sent, and some was not.
        last: The last call it was seen in.
        lost: Why it will say nothing more, or "".
    """

    rank: int
    host: str
    connection: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    frames: dict[int, Frame] = field(default_factory=dict)
    gave_up: dict[int, str] = field(default_factory=dict)
    first: int = 0
    midway: bool = False
    last: str = ""
    lost: str = ""

    @property
    def name(self) -> str:
        """The rank, and where it is: "rank 3 on node2"."""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}"

    @property
    def seen(self) -> str:
        """The rank, and where it was seen last."""
        return f"{self.name}, {f'last seen in {self.last}' if self.last else 'not seen in any collective here'}"

    @property
    def sends_data(self) -> bool:
        """What it sends now is data, which waits until it is asked for."""
        return is_bulk(self.inbox)

    @property
    def is_ahead(self) -> bool:
        """Enough is known of what it did in exchanges that this rank has not come to: the rest is left for later."""
        return len(self.frames) >= _MOST_AHEAD

    def post(self, data: bytes | bytearray) -> None:
        """Send, or keep for later what cannot be sent now."""
        if self.lost:
            return
        if self.outbox:
            self.outbox += data
            return
        sent = self.send(data)
        if sent < len(data):
            self.outbox += memoryview(data)[sent:]

    def flush(self) -> None:
        """Send what could not be sent before."""
        data, self.outbox = self.outbox, bytearray()
        self.post(data)

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send what can be sent now, and return how much that was."""
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # nobody will read it; but what the other side said before its end is still to be read

    def receive(self) -> None:
        """Read all that there is. Data is left in the connection."""
        while not (self.lost or self.sends_data or self.is_ahead):
            try:
                piece = self.connection.recv(_PIECE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            self.inbox += piece
            self.read_inbox()
            if not piece:
                self.end(_ENDED)

    def begin_data(self) -> bool:
        """Return whether the peer has begun to send data, and take its head."""
        self.receive()
        begun = self.sends_data
        if begun:
            take_bulk_head(self.inbox)
        return begun

    def receive_into(self, room: memoryview) -> int:
        """Fill memory with data that the peer sends, and return how much came."""
        taken = min(len(self.inbox), len(room))
        if taken:
            room[:taken] = self.inbox[:taken]
            del self.inbox[:taken]
            return taken
        try:
            received = self.connection.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError:
            received = 0
        if not received:
            self.end(_ENDED)
        return received

    def read_inbox(self) -> None:
        """Sort the frames that were received."""
        while (frame := take_frame(self.inbox)) is not None:
            if frame.kind is FrameKind.LEFT:
                self.end(frame.call)
            elif frame.kind is FrameKind.GAVE_UP:
                self.gave_up[frame.sequence] = frame.call
            else:
                self.last = frame.call
                if frame.sequence >= self.first:
                    self.frames[frame.sequence] = frame

    def forget_before(self, sequence: int) -> None:
        """Forget what was said of earlier exchanges, and what is still to come of them."""
        self.first = sequence
        for old in [number for number in self.frames if number < sequence]:
            del self.frames[old]
        for old in [number for number in self.gave_up if number < sequence]:
            del self.gave_up[old]

    def end(self, reason: str) -> None:
        """Note why it will say nothing more."""
        self.lost = self.lost or reason
        self.outbox.clear()
