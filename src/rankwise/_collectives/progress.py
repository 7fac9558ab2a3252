"""What a caller is told while the large values of a collective are written, sent and received: `progress=`.

Large data move in steps, whoever is told: the ranks of one call may differ in that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.control.transports import Prepared
from rankwise.errors import InvalidArgumentError, shown

# Takes the bytes that are done, and all of them.
ProgressCallback: TypeAlias = Callable[[int, int], object]
# The longest part of a tensor that moves in one step.
_STEP_BYTES: Final = 1 << 25


class Progress:
    """The progress of one call on this rank.

    An error of the callback may not keep the other ranks waiting for data: the callback is not called any more, and the
    error is raised after the call.
    """

    def __init__(self, callback: object = None) -> None:
        """Begin with no bytes expected.

        Raises:
            InvalidArgumentError: The callback is neither callable nor None.
        """
        if callback is not None and not callable(callback):
            raise InvalidArgumentError(f"progress must be a function of two integers, or None; got {shown(callback)}")
        self._callback = callback
        self._done = self._total = 0
        self._error: Exception | None = None

    def expect(self, nbytes: int) -> None:
        """Add bytes that are to be written, sent or received."""
        self._total += nbytes

    def advance(self, nbytes: int) -> None:
        """Tell that so many more of them have been."""
        self._done += nbytes
        if self._callback is None or not nbytes:
            return
        try:
            self._callback(self._done, self._total)
        except Exception as error:  # noqa: BLE001 - raised later
            self._error, self._callback = error, None

    def expect_no_more(self) -> None:
        """Drop what is expected and not done: it will be moved otherwise."""
        self._total = self._done

    def raise_error(self) -> None:
        """Raise the error of the callback, if there is one; after the call, when no rank waits for this one."""
        if self._error is not None:
            raise self._error


def in_steps(
    tensors: Sequence[torch.Tensor], prepare: Callable[[slice], Prepared[None]], progress: Progress
) -> Prepared[None]:
    """Prepare an operation on flat uint8 tensors as several, each on the same part of all of them.

    Args:
        tensors: The tensors, whose lengths may differ.
        prepare: Prepares the operation on a part.
        progress: Is told of the bytes of all tensors.
    """
    longest = max((data.numel() for data in tensors), default=0)
    moves: list[tuple[Prepared[None], int]] = []
    for start in range(0, longest, _STEP_BYTES):
        part = slice(start, start + _STEP_BYTES)
        moves.append((prepare(part), sum(data[part].numel() for data in tensors)))
    progress.expect(sum(nbytes for _, nbytes in moves))

    def run() -> None:
        for move, nbytes in moves:
            move()
            progress.advance(nbytes)

    return run


def transfer(
    comm: Comm,
    outgoing: Sequence[tuple[torch.Tensor, int]],
    incoming: Sequence[tuple[torch.Tensor, int]],
    progress: Progress,
) -> Prepared[None]:
    """Prepare to send flat uint8 tensors to group ranks, and to fill others from group ranks, in steps."""

    def prepare(part: slice) -> Prepared[None]:
        return comm.transfer(
            [(data[part], dst) for data, dst in outgoing], [(data[part], src) for data, src in incoming]
        )

    return in_steps([data for data, _ in (*outgoing, *incoming)], prepare, progress)
