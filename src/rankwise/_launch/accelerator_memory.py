"""The memory of this host's accelerators: a driver may release that of a process only after the process has ended.

Asked of NVIDIA's management library, which opens no context on a device, as torch would. Without it, nothing is known.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

_LIBRARY: Final = "libnvidia-ml.so.1"
# A restart waits so long in all, and so long after the last time that memory was released.
_MOST_SECONDS: Final = 30.0
_UNCHANGED_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
# What the driver itself may take more than before.
_SLACK_BYTES: Final = 1 << 26


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_memory() -> dict[int, int]:
    """Return how many bytes are in use on each accelerator of this host, by its index; {} if that is not known."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return {}
    if library.nvmlInit_v2() != 0:
        return {}
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        found = {index: _used_on(library, index) for index in range(count.value)}
        return {index: used for index, used in found.items() if used is not None}
    finally:
        library.nvmlShutdown()


def _used_on(library: ctypes.CDLL, index: int) -> int | None:
    """Return the bytes in use on a device; None if this user may not know."""
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    return int(memory.used)


@dataclass(frozen=True, slots=True)
class AcceleratorMemory:
    """The memory in use before the first ranks were started."""

    before: Mapping[int, int] = field(default_factory=used_memory)

    def wait_until_free(self, pause: Callable[[float], object]) -> str:
        """Wait until no more is in use than before, for a limited time; return what is still in use, or "".

        Args:
            pause: Called to wait for so many seconds.
        """
        start = changed = time.monotonic()
        left = self._more_than_before() if self.before else {}
        while left and (now := time.monotonic()) - start < _MOST_SECONDS and now - changed < _UNCHANGED_SECONDS:
            pause(_POLL_SECONDS)
            before, left = left, self._more_than_before()
            if sum(left.values()) < sum(before.values()):
                changed = now
        texts = [f"{more >> 20} MiB of accelerator {index}" for index, more in left.items()]
        return f"{', '.join(texts)} are still in use, which were free before the ranks started" if texts else ""

    def _more_than_before(self) -> dict[int, int]:
        more = {index: used - self.before.get(index, used) for index, used in used_memory().items()}
        return {index: nbytes for index, nbytes in more.items() if nbytes > _SLACK_BYTES}
