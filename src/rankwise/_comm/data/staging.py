"""Memory through which the tensors of a group pass: a row for each member, which the others read, in two halves.

An operation is a series of steps, which use the halves in turn. In a step each member writes to its row, all members
come to a point that they pass together, and then they read. So what is written in a step may be read until the next one
has been written: no member writes to a half again before all have read what it had. The numbers of the steps go on
from one operation to the next, and each row has the number of its step: a member that was left behind is noticed.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch

from rankwise._comm.control.page_channel import PageChannel
from rankwise.errors import CollectiveError

# Of all rows in both halves; and the longest row. With rows of 1 MB the members wait for each other too often; longer
# ones than these are no faster: see docs/benchmarks.md.
_STAGING_BYTES: Final = 1 << 26
_MAX_ROW_BYTES: Final = 1 << 23
_HALVES: Final = 2


class Staging:
    """The memory of one group, mapped in this process.

    Attributes:
        row_bytes: The length of a row.
        step: The number of the last step.
    """

    def __init__(self, channel: PageChannel, *, group_rank: int, size: int) -> None:
        """Map the memory.

        Raises:
            CollectiveError: There is no address space.
        """
        self._own = group_rank
        self._size = size
        # Before the rows of a half are the numbers of their steps. Rows begin at pages: each member allocates its own.
        self._header = -(-8 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        room = _STAGING_BYTES // (_HALVES * size)
        self.row_bytes = min(_MAX_ROW_BYTES, room) // mmap.PAGESIZE * mmap.PAGESIZE
        self._half_bytes = self._header + size * self.row_bytes
        try:
            self._memory = channel.map_staging(_HALVES * self._half_bytes)
            for half in range(_HALVES):
                self._memory.allocate(half * self._half_bytes, self._header)
        except OSError as error:
            raise _no_memory(_HALVES * self._half_bytes, error) from error
        self._steps = [self._memory.words(half * self._half_bytes, size) for half in range(_HALVES)]
        self._rows: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._allocated = 0
        self.step = 0

    def reserve(self, nbytes: int) -> None:
        """Allocate the first bytes of this rank's rows.

        Raises:
            CollectiveError: There is no memory.
        """
        wanted = min(self.row_bytes, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if wanted <= self._allocated:
            return
        try:
            for half in range(_HALVES):
                start = half * self._half_bytes + self._header + self._own * self.row_bytes
                self._memory.allocate(start + self._allocated, wanted - self._allocated)
        except OSError as error:
            raise _no_memory(_HALVES * wanted, error) from error
        self._allocated = wanted

    def rows(self, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
        """Return the rows of a step as flat tensors, by group rank."""
        if dtype not in self._rows:
            numel = self.row_bytes // dtype.itemsize
            self._rows[dtype] = [
                [self._memory.tensor(start + member * self.row_bytes, dtype, numel) for member in range(self._size)]
                for start in (half * self._half_bytes + self._header for half in range(_HALVES))
            ]
        return self._rows[dtype][step % _HALVES]

    def set_written(self, step: int) -> None:
        """Record that this rank has written its row of a step; before the point that all members pass together."""
        self._steps[step % _HALVES][self._own] = step

    def begin(self, step: int) -> None:
        """Begin to read the rows of a step, after that point.

        Raises:
            CollectiveError: A member has written another step: one of its calls has failed on that rank alone.
        """
        self.step = step
        written = self._steps[step % _HALVES].tolist()
        if written.count(step) != self._size:
            raise CollectiveError(f"the members of the group are in different steps: {written}, and {step} here")


def _no_memory(nbytes: int, error: OSError) -> CollectiveError:
    return CollectiveError(
        f"there is no memory for {nbytes:,} bytes that the ranks of this host share, through which large tensors pass; "
        f"with RANKWISE_SHARED_MEMORY=0 they use connections: {error}"
    )
