"""Processes that the kernel has killed because memory ran out, counted by the kernel itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rankwise._memory import CGROUP, CGROUPS, counters, memory_groups

_VMSTAT: Final = Path("/proc/vmstat")
# The files of a control group with the counter, of version 2 and of version 1, and its name.
_EVENTS: Final = ("memory.events", "memory.oom_control")
_NAME: Final = "oom_kill"
# The explanation of SIGKILL where no kill was counted: no other sender is as frequent.
POSSIBLE_OOM: Final = "out of memory?"


def count_oom_kills(vmstat: Path = _VMSTAT, cgroup: Path = CGROUP, cgroups: Path = CGROUPS) -> dict[str, int]:
    """Return how many processes the kernel has killed because memory ran out, by whose limit that was.

    Counters that cannot be read are left out.
    """
    files = [folder / name for folder in memory_groups(cgroup, cgroups) for name in _EVENTS]
    counts = [count for file in files if (count := counters(file).get(_NAME)) is not None]
    found = {"this job's control group": counts[0]} if counts else {}
    total = counters(vmstat).get(_NAME)
    return found if total is None else found | {"this host": total}


def oom_explanation(before: dict[str, int], after: dict[str, int]) -> str:
    """Return an explanation for a process that was killed between two counts; "" if no kill was counted."""
    for whose, count in after.items():
        if count > before.get(whose, count):
            return f"out of memory: the kernel has killed for want of memory of {whose}"
    return ""
