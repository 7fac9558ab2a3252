"""A range of the page's file that this process has mapped, for tensors.

It is mapped by the C library, and not by Python's `mmap`: that would keep a descriptor for each range.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any, Final

import torch

_FAILED: Final = ctypes.c_void_p(-1).value
# The call that frees memory for all processes that have mapped it; Python has it for its own maps alone.
_REMOVE: Final = getattr(mmap, "MADV_REMOVE", 0)


class SharedRange:
    """Memory that all ranks of the host may map; it is unmapped when nothing refers to the range or its tensors.

    Attributes:
        address: The address in this process.
    """

    def __init__(self, descriptor: int, offset: int, nbytes: int, *, own: range) -> None:
        """Map the range, without memory.

        Args:
            descriptor: The descriptor of the file.
            offset: The offset in the file, a multiple of the page size.
            nbytes: The length of the range.
            own: The part of the range whose memory is freed with it, by offset in the range; its ends are multiples of
                the page size.

        Raises:
            OSError: There is no address space.
        """
        self._descriptor = descriptor
        self._offset = offset
        libc = _libc()
        address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
        if address == _FAILED:
            raise _error("the memory cannot be mapped")
        self.address: int = address
        # What the tensors refer to: it is older than this object, and may live longer.
        self._memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(self._memory, _release, os.getpid(), address, nbytes, own).atexit = False

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


def _release(pid: int, address: int, nbytes: int, own: range) -> None:
    """Unmap a range, and free the memory of a part, unless this is a forked child, whose parent goes on to use it."""
    libc = _libc()
    if own and os.getpid() == pid:
        libc.madvise(address + own.start, len(own), _REMOVE)
    libc.munmap(address, nbytes)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


@cache
def _libc() -> Any:  # noqa: ANN401 - ctypes has no types
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        getattr(ctypes, "c_off_t", ctypes.c_long),
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
