"""The frames of one group that another rank has sent over its connection, until this rank comes to their exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from rankwise._comm.control.protocol import Frame, FrameKind, read_report, without_traceback
from rankwise.errors import RankwiseError

# The number of exchanges that a member may be ahead before tracebacks of its failures are dropped. Only a member that
# fails in each of them gets so far, since all others wait for this rank.
_MAX_TRACEBACKS: Final = 1000


@dataclass(slots=True)
class Inbox:
    """The frames of one group that a peer has sent.

    Attributes:
        frames: Its frames of exchanges that this rank has not finished, by sequence number.
        arrivals: Its announcements that it is in an exchange, without bodies, by sequence number.
        bundles: The frames of other members that it has sent for exchanges, by sequence number.
        errors: The errors by which it has ended exchanges for all members, by sequence number.
        first_sequence: The first exchange that this rank has not finished.
        last_call: The last call it was seen in.
        left: The reason why it takes part in no further exchange; "" if it does.
        last_sequence: The last exchange that it is known to have entered.
    """

    frames: dict[int, Frame] = field(default_factory=dict)
    arrivals: dict[int, Frame] = field(default_factory=dict)
    bundles: dict[int, Frame] = field(default_factory=dict)
    errors: dict[int, RankwiseError] = field(default_factory=dict)
    first_sequence: int = 0
    last_call: str = ""
    left: str = ""
    last_sequence: int = 0

    def store(self, frame: Frame) -> None:
        self.last_sequence = max(self.last_sequence, frame.sequence)
        if frame.kind is FrameKind.LEFT:
            self.left = self.left or frame.call
        elif frame.kind is FrameKind.ENDED:
            self.errors[frame.sequence] = read_report(frame.body)
        elif frame.kind is FrameKind.BUNDLE:
            self.bundles[frame.sequence] = frame
        else:
            self.last_call = frame.call
            # A frame of a finished exchange comes from a member that was late for an exchange that failed here.
            if frame.sequence >= self.first_sequence:
                if frame.kind is FrameKind.FAILED and len(self.frames) >= _MAX_TRACEBACKS:
                    frame.body = without_traceback(frame.body, frame.call)
                (self.arrivals if frame.kind is FrameKind.ARRIVED else self.frames)[frame.sequence] = frame

    def discard_before(self, sequence: int) -> None:
        """Discard the frames of exchanges before `sequence`, including those that have not arrived yet."""
        self.first_sequence = sequence
        stored: dict[int, Any]
        for stored in (self.frames, self.arrivals, self.bundles, self.errors):
            for old in [number for number in stored if number < sequence]:
                del stored[old]
