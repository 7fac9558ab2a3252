"""The operations whose tensors pass through a `Staging`, each as a series of steps with a chunk of the tensors.

In a step each member first writes the chunk of the next step, so that one meeting of all members follows each step.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from rankwise._comm.data.flat_range import FlatRange
from rankwise._comm.data.staging import Staging
from rankwise._comm.reduce_ops import Op, fold


class Steps(ABC):
    """The steps of one operation.

    Attributes:
        staging: The memory.
        count: The number of steps.
        nbytes: How much of the rows a step takes.
        writes: This member writes to its row.
        has_end: The members wait for each other after the last step too.
    """

    staging: Staging
    count: int
    nbytes: int
    writes = True
    has_end = False

    @property
    def has_meetings(self) -> bool:
        """The members wait for each other again after the first chunk was written."""
        return self.count > 1 or self.has_end

    def write_first(self) -> None:
        """Write the chunk of the first step, before the members wait for each other."""
        self._start = self._write(0)

    def run(self, meet: Callable[[], None]) -> None:
        """Run all steps; the members have written the chunk of the first one, and have waited for each other."""
        start = self._start
        for index in range(self.count):
            self.staging.begin(start, self.nbytes)
            following = self._write(index + 1) if index + 1 < self.count else 0
            self.read(start, index)
            if index + 1 < self.count or self.has_end:
                meet()
            self.finish(start, index)
            start = following

    def _write(self, index: int) -> int:
        start = self.staging.place(self.nbytes)
        self.write(start, index)
        self.staging.set_written()
        return start

    @abstractmethod
    def write(self, start: int, index: int) -> None:
        """Write a chunk to this rank's row, from a byte on."""

    @abstractmethod
    def read(self, start: int, index: int) -> None:
        """Read the rows of all members."""

    def finish(self, start: int, index: int) -> None:  # noqa: B027 - most have nothing to do
        """Read what the members have written in `read`."""


class Reduction:
    """What is done with the same elements of all members."""

    def __init__(self, op: Op, *, divisor: int = 1, is_wide: bool = False) -> None:
        """Reduce, and divide floats and complex numbers.

        Args:
            op: The reduction.
            divisor: What its results are divided by.
            is_wide: The elements are half-precision floats, which are summed and divided in float32, and rounded once.
        """
        self._op = op
        self._divisor = divisor
        self._is_wide = is_wide
        self._wide = torch.empty(0, device="cpu")

    def reserve(self, numel: int) -> None:
        """Allocate the memory for this many elements."""
        if self._is_wide:
            self._wide = torch.empty(numel, dtype=torch.float32, device="cpu")

    def run(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce tensors in the order of ranks, into `out`, which may be the first of them."""
        if self._is_wide:
            total = self._wide[: out.numel()].copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
        else:
            total = fold(parts, self._op, out=out)
        if self._divisor != 1:
            total.div_(self._divisor)
        if self._is_wide:
            out.copy_(total)


class ReducedByAll(Steps):
    """A small tensor, which every member reduces: it then need not wait for the others again."""

    count = 1

    def __init__(self, staging: Staging, flat: FlatRange, reduction: Reduction) -> None:
        self.staging = staging
        self.nbytes = flat.nbytes
        self._flat = flat
        self._reduction = reduction
        reduction.reserve(flat.numel)
        self._whole = flat.part(0, flat.numel)
        self._result = torch.empty(flat.numel, dtype=flat.dtype, device="cpu") if self._whole is None else self._whole

    def write(self, start: int, index: int) -> None:  # noqa: ARG002
        self._flat.load(0, self._flat.numel, self._place(self.staging.own, start))

    def read(self, start: int, index: int) -> None:  # noqa: ARG002
        places = [self._place(member, start) for member in range(self.staging.size)]
        self._reduction.run(places, self._result)
        if self._whole is None:
            self._flat.store(0, self._flat.numel, self._result)

    def _place(self, member: int, start: int) -> torch.Tensor:
        first = start // self._flat.dtype.itemsize
        return self.staging.rows(self._flat.dtype)[member][first : first + self._flat.numel]


class ReducedBySlice(Steps):
    """A large tensor, of which each member reduces a slice.

    A place has a region for each member: those of the others get their slices of this rank's chunk, and that of this
    rank the reduction of its slice.
    """

    has_end = True

    def __init__(self, staging: Staging, flat: FlatRange, reduction: Reduction) -> None:
        self.staging = staging
        self._flat = flat
        self._reduction = reduction
        itemsize = flat.dtype.itemsize
        self._length = min(flat.numel, staging.max_step_bytes // itemsize // staging.size * staging.size)
        self._region = -(-self._length // staging.size)
        self._rows = staging.rows(flat.dtype)
        self.count = -(-flat.numel // self._length)
        self.nbytes = staging.size * self._region * itemsize
        reduction.reserve(self._region)
        # The slice that this rank reduces, where it is in several tensors.
        is_whole = flat.part(0, flat.numel) is not None
        self._own = torch.empty(0 if is_whole else self._region, dtype=flat.dtype, device="cpu")

    def write(self, start: int, index: int) -> None:
        own = self.staging.own
        for member, (first, last) in enumerate(self._slices(index)):
            if member != own:
                self._flat.load(first, last, self._region_of(own, member, start, last - first))

    def read(self, start: int, index: int) -> None:
        own = self.staging.own
        first, last = self._slices(index)[own]
        if first == last:
            return
        parts = [self._region_of(member, own, start, last - first) for member in range(self.staging.size)]
        part, out = self._flat.part(first, last), parts[own]
        parts[own] = self._flat.load(first, last, self._own[: last - first]) if part is None else part
        self._reduction.run(parts, out)

    def finish(self, start: int, index: int) -> None:
        for member, (first, last) in enumerate(self._slices(index)):
            self._flat.store(first, last, self._region_of(member, member, start, last - first))

    def _slices(self, index: int) -> Sequence[tuple[int, int]]:
        """Return the ends of the members' slices of a chunk."""
        start, size = index * self._length, self.staging.size
        numel = min(self._length, self._flat.numel - start)
        return list(itertools.pairwise(start + numel * member // size for member in range(size + 1)))

    def _region_of(self, row: int, member: int, start: int, numel: int) -> torch.Tensor:
        first = start // self._flat.dtype.itemsize + member * self._region
        return self._rows[row][first : first + numel]


class Scattered(Steps):
    """Pieces for the members, of which each member reduces its own ones."""

    def __init__(self, staging: Staging, pieces: Sequence[torch.Tensor], result: torch.Tensor, op: Op) -> None:
        self.staging = staging
        self._op = op
        self._region = min(result.numel(), staging.max_step_bytes // result.element_size() // staging.size)
        self._chunks = [piece.split(self._region) for piece in pieces]
        self._results = result.split(self._region)
        self._rows = staging.rows(result.dtype)
        self.count = len(self._results)
        self.nbytes = staging.size * self._region * result.element_size()

    def write(self, start: int, index: int) -> None:
        own = self.staging.own
        for member, chunks in enumerate(self._chunks):
            if member != own:
                self._region_of(own, member, start, index).copy_(chunks[index])

    def read(self, start: int, index: int) -> None:
        own = self.staging.own
        parts = [self._region_of(member, own, start, index) for member in range(self.staging.size)]
        parts[own] = self._chunks[own][index]
        fold(parts, self._op, out=self._results[index])

    def _region_of(self, row: int, member: int, start: int, index: int) -> torch.Tensor:
        out = self._results[index]
        first = start // out.element_size() + member * self._region
        return self._rows[row][first : first + out.numel()]


class Gathered(Steps):
    """Tensors of bytes, of which every member gets all; a shorter one has no part in the last steps."""

    def __init__(self, staging: Staging, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> None:
        self.staging = staging
        self.nbytes = min(max(part.numel() for part in gathered), staging.max_step_bytes)
        self._chunks = data.split(self.nbytes)
        self._gathered = [part.split(self.nbytes) for part in gathered]
        self._rows = staging.rows(torch.uint8)
        self.count = max(map(len, self._gathered))

    def write(self, start: int, index: int) -> None:
        for chunk in self._chunks[index : index + 1]:
            self._rows[self.staging.own][start : start + chunk.numel()].copy_(chunk)

    def read(self, start: int, index: int) -> None:
        for row, chunks in zip(self._rows, self._gathered, strict=True):
            for chunk in chunks[index : index + 1]:
                chunk.copy_(row[start : start + chunk.numel()])


class Spread(Steps):
    """A tensor of bytes of one member, which all others get."""

    def __init__(self, staging: Staging, data: torch.Tensor, src: int) -> None:
        self.staging = staging
        self.nbytes = min(data.numel(), staging.max_step_bytes)
        self.writes = staging.own == src
        self._chunks = data.split(self.nbytes)
        self._row = staging.rows(torch.uint8)[src]
        self.count = len(self._chunks)

    def write(self, start: int, index: int) -> None:
        if self.writes:
            self._place(start, index).copy_(self._chunks[index])

    def read(self, start: int, index: int) -> None:
        if not self.writes:
            self._chunks[index].copy_(self._place(start, index))

    def _place(self, start: int, index: int) -> torch.Tensor:
        return self._row[start : start + self._chunks[index].numel()]
