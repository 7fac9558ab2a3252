"""Memory through which the tensors of a group pass: each member has a row, which it writes and the others read.

An operation is a series of steps. In a step each member writes to a place in its row, all members come to a point that
they pass together, and then they read. Steps take places one after the other, and begin anew at the end of the row: a
place is used again when all have read it. Not sooner than that, for another reason: it takes a processor several times
as long to write to memory that is in the caches of others. The numbers of the steps go on from one operation to the
next, and each row has the number of its last step: a member that was left behind is noticed.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch

from rankwise._comm.control.page_channel import PageChannel
from rankwise.errors import CollectiveError

# All rows together; and what steps use in turn at least, so that it is not in a cache any more.
_STAGING_BYTES: Final = 1 << 26
_CYCLE_BYTES: Final = 1 << 22
# Small steps use at most so many places.
_MAX_PLACES: Final = 64
# Three steps that follow each other have places that do not overlap if none is longer than this part of a row.
_MAX_PART: Final = 4
# The longest part of a step that one member reduces: more would not stay in the caches until the others read it, and
# with less the members meet more often.
_MEMBER_BYTES: Final = 1 << 20
_MAX_ROW_BYTES: Final = 1 << 25
_ALIGNMENT: Final = 64


class Staging:
    """The memory of one group, mapped in this process.

    Attributes:
        max_step_bytes: The longest place of a step.
        step: The number of the last step.
        size: The number of members.
        own: The group rank of this process.
    """

    def __init__(self, channel: PageChannel, *, group_rank: int, size: int) -> None:
        """Map the memory.

        Raises:
            CollectiveError: There is no address space, or no memory.
        """
        self.own = group_rank
        self.size = size
        # Before the rows are the numbers of their steps, of even and of odd ones.
        self._header = _round_up(16 * size)
        self._row_bytes = min(_MAX_ROW_BYTES, _STAGING_BYTES // size) // mmap.PAGESIZE * mmap.PAGESIZE
        longest = min(_MEMBER_BYTES * size, self._row_bytes // _MAX_PART)
        self.max_step_bytes = longest // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = self._header + size * self._row_bytes
        self._memory = channel.map_staging(nbytes)
        self._memory.allocate(0, self._header)
        words = self._memory.words(0, 2 * size)
        self._steps = words[:size], words[size:]
        self._rows: dict[torch.dtype, list[torch.Tensor]] = {}
        self._cycle = self._allocated = self._end = 0
        self.step = 0

    def reserve(self, nbytes: int) -> None:
        """Allocate this rank's memory for steps with places of this length, at most `max_step_bytes`.

        Raises:
            CollectiveError: There is no memory.
        """
        wanted = _round_up(self._cycle_of(nbytes))
        if wanted > self._allocated:
            first = self._header + self.own * self._row_bytes + self._allocated
            self._memory.allocate(first, wanted - self._allocated)
            self._allocated = wanted

    def place(self, nbytes: int) -> int:
        """Return where in the rows the place of the next step begins, the same on all members."""
        return self._end if self._end + nbytes <= self._cycle_of(nbytes) else 0

    def rows(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the rows as flat tensors, by group rank."""
        if dtype not in self._rows:
            numel = self._row_bytes // dtype.itemsize
            starts = [self._header + member * self._row_bytes for member in range(self.size)]
            self._rows[dtype] = [self._memory.tensor(start, dtype, numel) for start in starts]
        return self._rows[dtype]

    def set_written(self) -> None:
        """Record that this rank has written its place of the next step; before the point that all members pass."""
        step = self.step + 1
        self._steps[step % 2][self.own] = step

    def begin(self, start: int, nbytes: int) -> None:
        """Begin the next step, after that point.

        Args:
            start: Where its place begins.
            nbytes: The length of the place.

        Raises:
            CollectiveError: A member has written another step: one of its calls has failed on that rank alone.
        """
        self.step += 1
        self._cycle = self._cycle_of(nbytes)
        self._end = start + _aligned(nbytes)
        written = self._steps[self.step % 2].tolist()
        if written.count(self.step) != self.size:
            raise CollectiveError(f"the members of the group are in different steps: {written}, and {self.step} here")

    def _cycle_of(self, nbytes: int) -> int:
        """Return the length of the part of the rows that steps use in turn."""
        wanted = max(_MAX_PART * nbytes, min(_CYCLE_BYTES // self.size, _MAX_PLACES * nbytes))
        return max(self._cycle, min(self._row_bytes, _aligned(wanted)))


def _aligned(nbytes: int) -> int:
    """Return a length that tensors of all dtypes have in common."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _round_up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
