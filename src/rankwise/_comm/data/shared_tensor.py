"""Tensors in memory that all members of a group have mapped: each has one, and they are reduced where they are.

Each member reduces one slice of the tensors of all members, and writes the result into all of them. It does so in
pieces that stay in its cache from the first read to the last write, so memory is read once and written once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch

from rankwise._comm.control.shared_range import SharedRange
from rankwise._comm.control.transports import Prepared
from rankwise._comm.reduce_ops import Op, fold
from rankwise.errors import PayloadTypeError

# Of the tensors of all members together.
_CACHED_BYTES: Final = 1 << 19
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})


class SharedTensor:
    """The tensor of this rank in memory that all members of a group have mapped, and access to those of the others.

    Attributes:
        tensor: The tensor of this rank: flat, at first zeros. The memory is freed when nothing refers to it any more.
    """

    def __init__(
        self,
        memory: SharedRange,
        dtype: torch.dtype,
        numel: int,
        *,
        group_rank: int,
        size: int,
        meetings: Callable[[], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        """Use mapped memory, which has `part_bytes` for each member, by group rank.

        Args:
            memory: The memory.
            dtype: The dtype of the tensors.
            numel: Their number of elements.
            group_rank: The group rank of this process.
            size: The number of members.
            meetings: Returns a block with a function that waits until all members have called it.
        """
        step = part_bytes(dtype, numel)
        self._parts = [memory.tensor(member * step, dtype, numel) for member in range(size)]
        self._group_rank = group_rank
        self._meetings = meetings
        self.tensor = self._parts[group_rank]

    def reduce(self, op: Op, start: int = 0, stop: int | None = None) -> Prepared[None]:
        """Prepare to reduce some elements of the members' tensors in place; all get the same bits.

        It is prepared before the members agree on a call, and run afterwards. Means are divided. Those of
        half-precision floats are computed in float32, and rounded once.

        Args:
            op: The operation; the dtype of its result is that of the tensor.
            start: The first element, the same on all members.
            stop: The end of the elements; that of the tensor by default.

        Raises:
            PayloadTypeError: The result has another dtype.
        """
        dtype = self.tensor.dtype
        if op.is_mean and not (dtype.is_floating_point or dtype.is_complex):
            raise PayloadTypeError(f"op={op.name!r} of {dtype} has another dtype")
        pieces = self._own_pieces(start, self.tensor.numel() if stop is None else stop)
        size = len(self._parts)
        wide = None
        if op.is_mean and dtype in _HALVES and pieces:
            wide = torch.empty_like(pieces[0][0], dtype=torch.float32, device="cpu")

        def run() -> None:
            with self._meetings() as meet:
                for parts in pieces:
                    if wide is None:
                        reduced = fold(parts, op, out=parts[0])
                        if op.is_mean:
                            reduced.div_(size)
                    else:
                        reduced = parts[0].copy_(_wide_sum(parts, wide).div_(size))
                    for part in parts[1:]:
                        part.copy_(reduced)
                meet()

        return run

    def _own_pieces(self, start: int, stop: int) -> list[Sequence[torch.Tensor]]:
        """Return the pieces that this rank reduces, each with the parts of all members."""
        size = len(self._parts)
        first = start + (stop - start) * self._group_rank // size
        last = start + (stop - start) * (self._group_rank + 1) // size
        step = max(1, _CACHED_BYTES // (size * self.tensor.element_size()))
        return list(zip(*(part[first:last].split(step) for part in self._parts), strict=True)) if last > first else []


def part_bytes(dtype: torch.dtype, numel: int) -> int:
    """Return the length of the memory of one member's tensor."""
    return -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _wide_sum(parts: Sequence[torch.Tensor], wide: torch.Tensor) -> torch.Tensor:
    """Return the sum of half-precision floats, in float32."""
    total = wide[: parts[0].numel()].copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total
