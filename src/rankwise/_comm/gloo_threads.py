"""The threads of gloo groups, which outlive a group that is still referred to."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

# The longest wait for the threads of a group that is still referred to, the number of consecutive checks that must find
# them idle, and the pause between two checks.
_TIMEOUT_SECONDS: Final = 10.0
_IDLE_CHECKS: Final = 2
_CHECK_SECONDS: Final = 0.001


def await_idle_threads() -> None:
    """Wait until the threads of groups that are still referred to, for example by a DDP model, are idle.

    A thread that has just ended a collective may have to release Python objects, for which it needs the GIL. If the
    model is destroyed meanwhile, it holds the GIL and waits for the thread: a deadlock. If the interpreter exits
    meanwhile, the thread ends the process with a signal. See docs/decisions/0006-letting-go-of-a-group.md.
    """
    start = time.monotonic()
    threads = [stat for stat in Path("/proc/self/task").glob("*/stat") if "(pt_gloo_runloop)" in _read(stat)]
    idle_checks = 0
    while threads and idle_checks < _IDLE_CHECKS and time.monotonic() - start < _TIMEOUT_SECONDS:
        time.sleep(_CHECK_SECONDS)  # releases the GIL: a thread that waits for it gets it now
        idle_checks = 0 if any(") R " in _read(stat) for stat in threads) else idle_checks + 1


def _read(stat: Path) -> str:
    """Return the state of a thread, "7 (NAME) R ..." while it runs; "" if it has ended."""
    with contextlib.suppress(OSError):
        return stat.read_text()
    return ""
