"""Several tensors as one flat range of memory, of which parts are copied to other memory, and back.

Parts that lie in several tensors are copied as bytes: for a small tensor, an operation of torch takes several times as
long as the copy itself.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from rankwise._comm.buffers import same_memory


class FlatRange:
    """Contiguous tensors of one dtype on the CPU, without gradients, one after the other.

    Attributes:
        dtype: Their dtype.
        numel: The number of their elements together.
        nbytes: Their length together.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Describe the range; there is one tensor or more."""
        self.dtype = tensors[0].dtype
        self._tensors = tensors
        self._itemsize = self.dtype.itemsize
        self._ends = list(itertools.accumulate(map(torch.Tensor.numel, tensors)))
        self.numel = self._ends[-1]
        self.nbytes = self.numel * self._itemsize
        # What precedes the first element of the range, if all of it were where each tensor is.
        starts = [0, *self._ends[:-1]]
        self._bases = list(
            map(operator.sub, map(torch.Tensor.data_ptr, tensors), [start * self._itemsize for start in starts])
        )

    def part(self, start: int, stop: int) -> torch.Tensor | None:
        """Return some elements as a flat tensor of the same memory; None if they lie in several tensors."""
        index = bisect_right(self._ends, start)
        if stop > self._ends[index]:
            return None
        tensor = self._tensors[index]
        first = start - (self._ends[index] - tensor.numel())
        own = same_memory(tensor) if tensor.is_inference() else tensor
        return own.view(-1)[first : first + stop - start]

    def load(self, start: int, stop: int, target: torch.Tensor) -> torch.Tensor:
        """Copy some elements to a flat contiguous tensor of as many, and return it."""
        if start < stop:
            if (part := self.part(start, stop)) is not None:
                target.copy_(part)
            else:
                own, copies, lengths = self._spans(start, stop, target)
                deque(map(ctypes.memmove, copies, own, lengths), maxlen=0)
        return target

    def store(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Replace some elements by those of a flat contiguous tensor."""
        if start < stop:
            if (part := self.part(start, stop)) is not None:
                part.copy_(values)
            else:
                own, copies, lengths = self._spans(start, stop, values)
                deque(map(ctypes.memmove, own, copies, lengths), maxlen=0)

    def _spans(self, start: int, stop: int, copy: torch.Tensor) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
        """Return the addresses of some elements, one for each tensor, those of their copies, and the lengths."""
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        bounds = [self._itemsize * bound for bound in (start, *self._ends[first:last], stop)]
        own = map(operator.add, self._bases[first : last + 1], bounds)
        copies = map((copy.data_ptr() - bounds[0]).__add__, bounds)
        return own, copies, map(operator.sub, bounds[1:], bounds)
