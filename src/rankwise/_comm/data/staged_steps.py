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
        nbytes: How much of the rows a step takes.
        has_end: The members wait for each other after the last step too.
    """

    staging: Staging
    count: int
    nbytes: int
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


class ReducedByAll(Steps):
    """A small tensor, which every member reduces: it then need not wait for the others again."""

    count = 1

    def __init__(self, staging: Staging, wire: torch.Tensor, op: Op) -> None:
        self.staging = staging
        self.nbytes = wire.nbytes
        self._wire = wire
        self._op = op

    def write(self, start: int, index: int) -> None:  # noqa: ARG002
        first, numel = start // self._wire.element_size(), self._wire.numel()
        self.staging.rows(self._wire.dtype)[self.staging.own][first : first + numel].copy_(self._wire)

    def read(self, start: int, index: int) -> None:  # noqa: ARG002
        first = start // self._wire.element_size()
        end = first + self._wire.numel()
        fold([row[first:end] for row in self.staging.rows(self._wire.dtype)], self._op, out=self._wire)


class ReducedBySlice(Steps):
    """A large tensor, of which each member reduces a slice.

    A place has a region for each member: those of the others get their slices of this rank's chunk, and that of this
    rank the reduction of its slice.
    """

    has_end = True

    def __init__(self, staging: Staging, wire: torch.Tensor, op: Op) -> None:
        self.staging = staging
        self._op = op
        length = min(wire.numel(), staging.max_step_bytes // wire.element_size() // staging.size * staging.size)
        self._region = -(-length // staging.size)
        self._chunks = wire.split(length)
        self._rows = staging.rows(wire.dtype)
        self.count = len(self._chunks)
        self.nbytes = staging.size * self._region * wire.element_size()

    def write(self, start: int, index: int) -> None:
        own = self.staging.own
        for member, part in enumerate(self._slices(index)):
            if member != own:
                self._region_of(own, member, start, part).copy_(part)

    def read(self, start: int, index: int) -> None:
        own = self.staging.own
        part = self._slices(index)[own]
        parts = [self._region_of(member, own, start, part) for member in range(self.staging.size)]
        out, parts[own] = parts[own], part
        fold(parts, self._op, out=out)

    def finish(self, start: int, index: int) -> None:
        for member, part in enumerate(self._slices(index)):
            part.copy_(self._region_of(member, member, start, part))

    def _slices(self, index: int) -> Sequence[torch.Tensor]:
        chunk, size = self._chunks[index], self.staging.size
        ends = [chunk.numel() * member // size for member in range(size + 1)]
        return [chunk[start:end] for start, end in itertools.pairwise(ends)]

    def _region_of(self, row: int, member: int, start: int, part: torch.Tensor) -> torch.Tensor:
        first = start // part.element_size() + member * self._region
        return self._rows[row][first : first + part.numel()]


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
