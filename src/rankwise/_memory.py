"""Memory of the host, and of the control groups by which containers and schedulers limit a process to a part of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

# Above this size it is checked that there is memory.
CHECKED_BYTES: Final = 1 << 26
# At least what version 1 of control groups has for no limit; it depends on the size of a page.
_UNLIMITED: Final = 1 << 62
# "oom_kill 7", or "SwapFree:       2048 kB".
_COUNTER: Final = re.compile(r"(\w+):? +(\d+)")
_MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/proc/self/cgroup")
CGROUPS: Final = Path("/sys/fs/cgroup")
# The files of a group, of version 2 and of version 1.
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_USAGES: Final = ("memory.current", "memory.usage_in_bytes")
# Contents of files on disk, which the kernel drops when memory is needed. Version 1 counts those of groups below apart.
_CACHES: Final = ({"inactive_file", "active_file"}, {"total_inactive_file", "total_active_file"})


def require_available(nbytes: int, *, reserve: int = 0) -> None:
    """Check that there is memory for so many bytes, if they are many: the system ends processes when there is none.

    Args:
        nbytes: The bytes.
        reserve: How many bytes have to be left then.

    Raises:
        MemoryError: There is less.
    """
    available = available_memory() if nbytes + reserve > CHECKED_BYTES else None
    if available is not None and nbytes + reserve > available:
        beside = f", of which {reserve} are for other processes" if reserve else ""
        raise MemoryError(
            f"{nbytes} bytes of values do not fit into the {available} bytes of memory that are free{beside}"
        )


def memory_of_host(meminfo: Path = _MEMINFO) -> int:
    """Return how many bytes the host has left, also by swapping; 0 if that cannot be known."""
    of_host = counters(meminfo)
    return (of_host.get("MemAvailable", 0) + of_host.get("SwapFree", 0)) << 10


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = CGROUP, cgroups: Path = CGROUPS) -> int | None:
    """Return how many bytes this process may still take, also by swapping; None if that cannot be known."""
    of_host = counters(meminfo)
    if "MemAvailable" not in of_host:
        return None
    of_groups = [_available_in(folder) for folder in memory_groups(cgroup, cgroups)]
    left = [of_group for of_group in of_groups if of_group is not None]
    return min([of_host["MemAvailable"] << 10, *left]) + (of_host.get("SwapFree", 0) << 10)


def memory_groups(cgroup: Path = CGROUP, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the folders of the control groups that count this process's memory, each before the one above it.

    In containers the file may have paths of the host, which do not exist there; the last folder does.
    """
    found = []
    # Version 2: "0::/path". Version 1 has a hierarchy for each controller: "4:memory:/path".
    for line in _lines(cgroup):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = cgroups / "memory" if controllers else cgroups
            folder = root / path.lstrip("/")
            found += [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return found


def counters(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line; none if it cannot be read."""
    found = (_COUNTER.match(line) for line in _lines(file))
    return {match[1]: int(match[2]) for match in found if match is not None}


def _available_in(folder: Path) -> int | None:
    """Return how many bytes a control group has left; None without a limit."""
    limits = [_number(folder / name) for name in _LIMITS]
    usages = [_number(folder / name) for name in _USAGES]
    for limit, usage, names in zip(limits, usages, _CACHES, strict=True):
        if limit is not None and limit < _UNLIMITED and usage is not None:
            numbers = counters(folder / "memory.stat")
            return max(0, limit - usage + sum(numbers.get(name, 0) for name in names))
    return None


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max" if there is no limit


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
