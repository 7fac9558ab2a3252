"""Waiting for a word of memory that several processes have mapped, by the system call futex of Linux."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any, Final

# The number of the system call in programs of 64 bits, by the name of the machine.
_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_WAIT: Final = 0
_WAKE: Final = 1
_ALL: Final = (1 << 31) - 1


def has_futex() -> bool:
    """Return whether this machine has the system call, as far as is known."""
    return sys.platform == "linux" and sys.maxsize > 1 << 32 and platform.machine() in _NUMBERS


class _Timeout(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """A word of 4 bytes, at an address in this process, on a machine with `has_futex`."""

    def __init__(self, address: int, *, pause: float) -> None:
        """Make the object; the memory must be mapped while it is used.

        Args:
            address: The address of the word.
            pause: The longest wait, in seconds.
        """
        self._number = _NUMBERS[platform.machine()]
        self._address = ctypes.c_void_p(address)
        self._timeout = ctypes.byref(_Timeout(int(pause), int(pause % 1 * 1e9)))

    def wait(self, value: int) -> None:
        """Wait until another process wakes this one, not at all if the word has another value, and at most a pause."""
        _syscall()(self._number, self._address, _WAIT, ctypes.c_uint(value), self._timeout, None, 0)

    def wake(self) -> None:
        """Wake all that wait."""
        _syscall()(self._number, self._address, _WAKE, _ALL, None, None, 0)


@cache
def _syscall() -> Any:  # noqa: ANN401 - ctypes has no types
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function
