"""The state of the runtime: the devices of this process, and that of each thread."""

from __future__ import annotations

import os
import threading
from typing import Any


class State(threading.local):
    """The device of the calling thread; the first one in threads that have none."""

    ordinal: int = 0


state = State()
devices: list[str] = []
replicated: list[str] = []
# The names of the functions that were called, by all threads.
calls: list[str] = []
_barriers: dict[int, threading.Barrier] = {}
_values: dict[int, Any] = {}


def initialize() -> None:
    """Find the devices, as the first use of one does."""
    if not devices:
        devices.extend(f"xla:{index}" for index in range(int(os.environ.get("CPU_NUM_DEVICES", "1"))))


def reset() -> None:
    """Forget the devices, as in a new process."""
    for names in (devices, replicated, calls):
        names.clear()
    _barriers.clear()
    state.__dict__.clear()


def exchange(value: object) -> list[Any]:
    """Return the values of all ranks, in their order. Collective over the threads of this process."""
    barrier = _barriers.setdefault(len(replicated), threading.Barrier(len(replicated)))
    _values[state.ordinal] = value
    barrier.wait(200)
    values = [_values[rank] for rank in range(len(replicated))]
    barrier.wait(200)
    return values


def _xla_runtime_is_initialized() -> bool:
    return bool(devices)


def _xla_set_default_device(device: str) -> str:
    initialize()
    state.ordinal = int(str(device).partition(":")[2])
    return str(device)
