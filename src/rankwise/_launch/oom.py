"""Processes that the kernel has killed because memory ran out, counted by the kernel itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_VMSTAT: Final = Path("/proc/vmstat")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
# The explanation of SIGKILL where no kill was counted: no other sender is as frequent.
POSSIBLE_OOM: Final = "out of memory?"


def count_oom_kills(vmstat: Path = _VMSTAT, cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> dict[str, int]:
    """Return how many processes the kernel has killed because memory ran out, by whose limit that was.

    Counters that cannot be read are left out.
    """
    found = {}
    # cgroup v2: "0::/path", with one file for each group. Version 1 has a counter for each controller, in another file.
    for line in _lines(cgroup):
        _, controllers, path = line.split(":", 2)
        name = "memory.events" if not controllers else "memory.oom_control"
        root = cgroups if not controllers else cgroups / "memory"
        if not controllers or "memory" in controllers.split(","):
            found.update(_count(root / path.lstrip("/") / name, "this job's control group"))
    return found | _count(vmstat, "this host")


def oom_explanation(before: dict[str, int], after: dict[str, int]) -> str:
    """Return an explanation for a process that was killed between two counts; "" if no kill was counted."""
    for whose, count in after.items():
        if count > before.get(whose, count):
            return f"out of memory: the kernel has killed for want of memory of {whose}"
    return ""


def _count(file: Path, whose: str) -> dict[str, int]:
    for line in _lines(file):
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return {whose: int(count)}
    return {}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
