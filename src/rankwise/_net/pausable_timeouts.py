"""Timeouts that a launcher can pause for all ranks of its host: while one of them is in a debugger, or all are stopped.

The ranks map a file of the launcher, which has one value: when the last pause has ended. The time that a rank waits
counts from there, so that a timeout begins anew after each pause.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from typing import Final

_BYTES: Final = 8  # written and read at once
_PAUSED: Final = (1 << 63) - 1


class TimeoutPause:
    """The launcher's side.

    Attributes:
        path: The path of the file for ranks of this host; "" where there is none.
    """

    def __init__(self) -> None:
        self.path = ""
        self._count = 0
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("rankwise-timeouts")
            os.ftruncate(self._descriptor, _BYTES)
            self._memory = mmap.mmap(self._descriptor, _BYTES)
            self._value = memoryview(self._memory).cast("q")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def begin(self) -> None:
        """Pause all timeouts, until `end` was called as often as this."""
        self._count += 1
        if self.path:
            self._value[0] = _PAUSED

    def end(self) -> None:
        """Let the timeouts begin anew, if no other pause is left."""
        self._count -= 1
        if self.path and not self._count:
            self._value[0] = time.monotonic_ns()

    def close(self) -> None:
        """Close the file. Ranks that are left keep what it has."""
        if self.path:
            self.path = ""
            self._value.release()
            self._memory.close()  # which has a descriptor of its own
            os.close(self._descriptor)


class _Timeouts:
    """The timeouts of a rank."""

    def __init__(self) -> None:
        self._last_end = memoryview(bytes(_BYTES)).cast("q")

    def follow(self, path: str) -> None:
        """Take part in the pauses of the launcher with that file."""
        with open(path, "rb") as file:  # noqa: PTH123 - before each script
            self._last_end = memoryview(mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)).cast("q")

    def elapsed_since(self, start: float) -> float:
        """Return the seconds since a time on the monotonic clock that count for a timeout."""
        now = time.monotonic()
        return max(0.0, min(now - start, now - self._last_end[0] / 1e9))


_timeouts: Final = _Timeouts()
follow_pauses: Final = _timeouts.follow
elapsed_since: Final = _timeouts.elapsed_since
