"""The frames of one group that another rank has sent over its connection, until this rank comes to their exchanges."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Final

from rankwise._comm.control.protocol import Frame, FrameKind

# The number of exchanges that a member may be ahead before tracebacks of its failures are dropped. Only a member that
# fails in each of them gets so far, since all others wait for this rank.
_MAX_TRACEBACKS: Final = 1000


@dataclass(slots=True)
class Inbox:
    """The frames of one group that a peer has sent.

    Attributes:
        frames: Its frames of exchanges that this rank has not finished, by sequence number.
        timeouts: The error messages of exchanges in which its timeout expired, by sequence number.
        first_sequence: The first exchange that this rank has not finished.
        last_call: The last call it was seen in.
        left: The reason why it takes part in no further exchange; "" if it does.
    """

    frames: dict[int, Frame] = field(default_factory=dict)
    timeouts: dict[int, str] = field(default_factory=dict)
    first_sequence: int = 0
    last_call: str = ""
    left: str = ""

    def store(self, frame: Frame) -> None:
        if frame.kind is FrameKind.LEFT:
            self.left = self.left or frame.call
        elif frame.kind is FrameKind.TIMED_OUT:
            self.timeouts[frame.sequence] = frame.call
        else:
            self.last_call = frame.call
            # A frame of a finished exchange comes from a member that was late for an exchange that failed here.
            if frame.sequence >= self.first_sequence:
                if frame.kind is FrameKind.FAILED and len(self.frames) >= _MAX_TRACEBACKS:
                    frame.body = pickle.dumps(replace(pickle.loads(frame.body), traceback=frame.call))
                self.frames[frame.sequence] = frame

    def discard_before(self, sequence: int) -> None:
        """Discard the frames of exchanges before `sequence`, including those that have not arrived yet."""
        self.first_sequence = sequence
        for old in [number for number in self.frames if number < sequence]:
            del self.frames[old]
        for old in [number for number in self.timeouts if number < sequence]:
            del self.timeouts[old]
