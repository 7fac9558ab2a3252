"""Whether the kernel has killed for want of memory: what it says itself, where it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_VMSTAT: Final = Path("/proc/vmstat")
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def count_oom_kills(vmstat: Path = _VMSTAT, cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> dict[str, int]:
    """Return how often the kernel has killed a process for want of memory, by whose memory that was.

    What cannot be read is left out.
    """
    found = {}
    # cgroup v2: "0::/path", with a file for each group. Version 1 keeps a like counter in another place.
    for line in _lines(cgroup):
        _, controllers, path = line.split(":", 2)
        name = "memory.events" if not controllers else "memory.oom_control"
        root = cgroups if not controllers else cgroups / "memory"
        if not controllers or "memory" in controllers.split(","):
            found.update(_count(root / path.lstrip("/") / name, "this job's control group"))
    return found | _count(vmstat, "this host")


def oom_explanation(before: dict[str, int], after: dict[str, int]) -> str:
    """Return what the kernel says to a process killed between two looks; "" if it says nothing."""
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
