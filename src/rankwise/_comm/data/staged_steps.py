"""The operations whose tensors pass through a `Staging`, each as a series of steps with a chunk of the tensors.

In a step each member first writes the chunk of the next step, so that one meeting of all members follows each step.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from rankwise._comm.data.staging import Staging
from rankwise._comm.reduce_ops import Op, fold


class Steps(ABC):
    """The steps of one operation.

    Attributes:
        staging: The memory.
        count: The number of steps.
        written_bytes: How much of its row a member writes at most.
        has_end: The members wait for each other after the last step too.
    """

    staging: Staging
    count: int
    written_bytes: int
    has_end = False

    def run(self, meet: Callable[[], None]) -> None:
        """Run all steps; the members have written the chunk of the first one, and have waited for each other."""
        first = self.staging.step + 1
        for index in range(self.count):
            step = first + index
            self.staging.begin(step)
            if index + 1 < self.count:
                self.write(step + 1, index + 1)
                self.staging.set_written(step + 1)
            self.read(step, index)
            if index + 1 < self.count or self.has_end:
                meet()
            self.finish(step, index)

    @abstractmethod
    def write(self, step: int, index: int) -> None:
        """Write a chunk to this rank's row."""

    @abstractmethod
    def read(self, step: int, index: int) -> None:
        """Read the rows of all members."""

    def finish(self, step: int, index: int) -> None:  # noqa: B027 - most have nothing to do
        """Read what the members have written in `read`."""


class ReducedByAll(Steps):
    """A small tensor, which every member reduces: it then need not wait for the others again."""

    count = 1

    def __init__(self, staging: Staging, group_rank: int, wire: torch.Tensor, op: Op) -> None:
        self.staging = staging
        self.written_bytes = wire.nbytes
        self._own = group_rank
        self._wire = wire
        self._op = op

    def write(self, step: int, index: int) -> None:  # noqa: ARG002
        self.staging.rows(self._wire.dtype, step)[self._own][: self._wire.numel()].copy_(self._wire)

    def read(self, step: int, index: int) -> None:  # noqa: ARG002
        numel = self._wire.numel()
        fold([row[:numel] for row in self.staging.rows(self._wire.dtype, step)], self._op, out=self._wire)


class ReducedBySlice(Steps):
    """A large tensor, of which each member reduces a slice.

    A row has a region for each member: those of the others get their slices of this rank's chunk, and that of this rank
    the reduction of its slice. Regions have fixed places, so a result is not overwritten before all have read it.
    """

    has_end = True

    def __init__(self, staging: Staging, group_rank: int, size: int, wire: torch.Tensor, op: Op) -> None:
        self.staging = staging
        self._own = group_rank
        self._size = size
        self._op = op
        self._region = staging.row_bytes // wire.element_size() // size
        self._chunks = wire.split(size * self._region)
        self.count = len(self._chunks)
        self.written_bytes = staging.row_bytes

    def write(self, step: int, index: int) -> None:
        row = self.staging.rows(self._chunks[0].dtype, step)[self._own]
        for member, part in enumerate(self._slices(index)):
            if member != self._own:
                self._region_of(row, member, part).copy_(part)

    def read(self, step: int, index: int) -> None:
        own = self._slices(index)[self._own]
        parts = [self._region_of(row, self._own, own) for row in self.staging.rows(own.dtype, step)]
        out, parts[self._own] = parts[self._own], own
        fold(parts, self._op, out=out)

    def finish(self, step: int, index: int) -> None:
        rows = self.staging.rows(self._chunks[0].dtype, step)
        for member, part in enumerate(self._slices(index)):
            part.copy_(self._region_of(rows[member], member, part))

    def _slices(self, index: int) -> Sequence[torch.Tensor]:
        chunk, size = self._chunks[index], self._size
        ends = [chunk.numel() * member // size for member in range(size + 1)]
        return [chunk[start:end] for start, end in itertools.pairwise(ends)]

    def _region_of(self, row: torch.Tensor, member: int, part: torch.Tensor) -> torch.Tensor:
        return row[member * self._region : member * self._region + part.numel()]


class Scattered(Steps):
    """Pieces for the members, of which each member reduces its own ones."""

    def __init__(
        self,
        staging: Staging,
        group_rank: int,
        size: int,
        pieces: Sequence[torch.Tensor],
        result: torch.Tensor,
        op: Op,
    ) -> None:
        self.staging = staging
        self._own = group_rank
        self._op = op
        self._region = staging.row_bytes // result.element_size() // size
        self._chunks = [piece.split(self._region) for piece in pieces]
        self._results = result.split(self._region)
        self.count = len(self._results)
        self.written_bytes = staging.row_bytes

    def write(self, step: int, index: int) -> None:
        row = self.staging.rows(self._results[0].dtype, step)[self._own]
        for member, chunks in enumerate(self._chunks):
            if member != self._own:
                self._region_of(row, member, index).copy_(chunks[index])

    def read(self, step: int, index: int) -> None:
        out = self._results[index]
        parts = [self._region_of(row, self._own, index) for row in self.staging.rows(out.dtype, step)]
        parts[self._own] = self._chunks[self._own][index]
        fold(parts, self._op, out=out)

    def _region_of(self, row: torch.Tensor, member: int, index: int) -> torch.Tensor:
        return row[member * self._region : member * self._region + self._results[index].numel()]


class Gathered(Steps):
    """Tensors of bytes, of which every member gets all."""

    def __init__(self, staging: Staging, group_rank: int, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> None:
        self.staging = staging
        self._own = group_rank
        self._chunks = data.split(staging.row_bytes)
        self._gathered = [part.split(staging.row_bytes) for part in gathered]
        self.count = len(self._chunks)
        self.written_bytes = min(data.numel(), staging.row_bytes)

    def write(self, step: int, index: int) -> None:
        chunk = self._chunks[index]
        self.staging.rows(torch.uint8, step)[self._own][: chunk.numel()].copy_(chunk)

    def read(self, step: int, index: int) -> None:
        for row, chunks in zip(self.staging.rows(torch.uint8, step), self._gathered, strict=True):
            chunks[index].copy_(row[: chunks[index].numel()])
