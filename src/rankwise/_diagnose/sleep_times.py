"""For how long processes have slept, from one look: when the scheduler last ran their main threads.

The kernel notes this time on a clock of the core, which may be seconds apart from those of other cores and from the
time of the day. So this process runs on that core for a moment, and reads the same clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_LAST_RUN: Final = "se.exec_start"
_CORE_FIELD: Final = 36  # of /proc/PID/stat, after the name of the program


def sleep_seconds(pids: Iterable[int]) -> Mapping[int, float]:
    """Return for how many seconds the main thread of each process has not run, as far as that can be read.

    The kernel must show /proc/PID/sched, and this process must be allowed to run on the core of the other one.
    """
    last: dict[int, list[tuple[int, float]]] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            last.setdefault(int(fields[_CORE_FIELD]), []).append((pid, _last_run(pid)))
    try:
        cores = os.sched_getaffinity(0)
    except (AttributeError, OSError):  # not Linux
        return {}
    seconds: dict[int, float] = {}
    try:
        for core in last.keys() & cores:
            with suppress(OSError, ValueError, IndexError):
                os.sched_setaffinity(0, {core})
                now = _last_run(os.getpid())
                seconds |= {pid: max(0.0, now - then) for pid, then in last[core]}
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
    return seconds


def _last_run(pid: int) -> float:
    """Return when the main thread of a process ran last, in seconds on the clock of its core."""
    lines = Path(f"/proc/{pid}/sched").read_text(errors="replace").splitlines()
    (last,) = (float(line.rpartition(":")[2]) for line in lines if line.startswith(_LAST_RUN))
    return last / 1000
