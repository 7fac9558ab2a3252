"""Memory that is mapped by the C library, and not by Python's `mmap`, which keeps a descriptor for each map."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any, Final

_FAILED: Final = ctypes.c_void_p(-1).value


def map_memory(descriptor: int, offset: int, nbytes: int, *, flags: int) -> Any:  # noqa: ANN401 - a ctypes array
    """Map a part of a file, to read and write; it is unmapped when nothing refers to the returned array.

    Args:
        descriptor: The descriptor of the file.
        offset: The offset in the file, a multiple of the page size.
        nbytes: The length, one or more.
        flags: `mmap.MAP_SHARED` or `mmap.MAP_PRIVATE`.

    Raises:
        OSError: There is no address space.
    """
    libc = _libc()
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{nbytes} bytes of memory cannot be mapped: {os.strerror(number)}")
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memory


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
    return libc
