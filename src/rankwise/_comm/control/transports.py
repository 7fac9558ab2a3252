"""The interfaces through which the members of a group agree: frames, or a data plane in groups without frames."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Protocol, TypeVar

import torch

from rankwise._comm.control.protocol import Call, Frame
from rankwise._comm.control.verdict import Combine, Verdict
from rankwise._comm.reduce_ops import Op

T = TypeVar("T")

# A data operation that has all of its memory, and has not run yet.
Prepared = Callable[[], T]
# The rest of an operation, run after its collective: it allocates memory, and no member waits for this rank any more.
Completion = Callable[[], T]


class FrameExchange(Protocol):
    """A group's exchange of frames with the other members."""

    def open(self) -> object:
        """Connect to the other members, if that was not done. Collective over the session for its first group."""

    def agree(
        self, call: Call, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> Verdict:
        """Exchange frames with the other members, as `Agreement.agree` describes it."""

    def post(self, frame: Frame) -> None:
        """Take part in the next exchange with a frame, without waiting for the frames of the others."""

    def dead_ranks(self, ranks: Container[int] | None) -> str:
        """Return the dead members, of `ranks` or of all, with reasons; "" if none is known. Does not wait."""

    def pending_call_from(self, rank: int) -> bool:
        """Return whether a rank has made a call in this group that this rank has not made. Does not wait."""

    @property
    def sequence(self) -> int:
        """The number of the last exchange of the group that this rank has entered; 0 before the first."""

    def close(self, reason: str) -> None:
        """Send the other members the reason why this rank leaves."""

    def shutdown(self, reason: str) -> None:
        """Leave, and release the connections if this is the group of all ranks of a session."""


class MessageTransport(Protocol):
    """The operations of a data plane by which members of a group without frames agree and send short messages."""

    message_device: torch.device

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Prepared[None]: ...
    def all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Prepared[None]: ...
    def broadcast(self, data: torch.Tensor, src: int) -> Prepared[None]: ...
    def transfer(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Prepared[None]: ...
