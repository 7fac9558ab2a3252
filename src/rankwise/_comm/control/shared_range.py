"""A range of the page's file that this process has mapped, for tensors."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from rankwise._comm.control.memory_map import map_memory


class SharedRange:
    """Memory that all ranks of the host may map; it is unmapped when nothing refers to the range or its tensors.

    Attributes:
        address: The address in this process.
    """

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Map the range, without memory.

        Args:
            descriptor: The descriptor of the file.
            offset: The offset in the file, a multiple of the page size.
            nbytes: The length of the range.

        Raises:
            OSError: There is no address space.
        """
        self._descriptor = descriptor
        self._offset = offset
        # What the tensors refer to: it may live longer than this object.
        self._memory = map_memory(descriptor, offset, nbytes, flags=mmap.MAP_SHARED)
        self.address = ctypes.addressof(self._memory)

    def allocate(self, start: int, nbytes: int) -> None:
        """Allocate the memory of a part: without that, writing to it would end the process where none is left.

        Raises:
            OSError: There is no memory.
        """
        os.posix_fallocate(self._descriptor, self._offset + start, nbytes)

    def words(self, offset: int, count: int) -> memoryview:
        """Return words of 8 bytes at an offset in the range; keep the range while they are used."""
        return memoryview((ctypes.c_char * (8 * count)).from_address(self.address + offset)).cast("B").cast("Q")

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor at an offset in the range; it has one element or more."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)
