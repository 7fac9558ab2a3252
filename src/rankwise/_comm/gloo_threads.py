"""The threads of gloo groups, which outlive a group that is still referred to."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

# How long the threads of a group that lives on may take to come to rest, how often in a row they are to be seen there,
# and the pause between two looks.
_REST_SECONDS: Final = 10.0
_LOOKS_AT_REST: Final = 2
_LOOK_SECONDS: Final = 0.001


def await_rest() -> None:
    """Let the threads of groups that live on, as a DDP model keeps one, finish what they are at.

    A thread that has just ended a collective may have objects of Python's to give back, for which it needs Python's
    lock. If the model goes meanwhile, it waits for the thread and has the lock: for good. If the interpreter ends
    meanwhile, the thread takes it down. See docs/decisions/0006-letting-go-of-a-group.md.
    """
    start = time.monotonic()
    threads = [stat for stat in Path("/proc/self/task").glob("*/stat") if "(pt_gloo_runloop)" in _read(stat)]
    at_rest = 0
    while threads and at_rest < _LOOKS_AT_REST and time.monotonic() - start < _REST_SECONDS:
        time.sleep(_LOOK_SECONDS)  # one that sleeps until it gets the lock gets it now
        at_rest = 0 if any(") R " in _read(stat) for stat in threads) else at_rest + 1


def _read(stat: Path) -> str:
    """Return what Linux says of a thread, "7 (NAME) R ..." for one that runs; "" if it has ended."""
    with contextlib.suppress(OSError):
        return stat.read_text()
    return ""
