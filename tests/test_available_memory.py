"""What is left of the memory of the host, and of the control groups of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from rankwise import _memory
from rankwise._comm import shared_memory
from rankwise._memory import available_memory, require_available

MEMINFO = "MemTotal:        9000 kB\nMemAvailable:       4 kB\nHugePages_Total:       0\nSwapFree:              1 kB\n"
HOST = 4096
SWAP = 1024

# The group of the process, the contents of files of groups, and what is left.
UNIFIED = "0::/job/step\n"
VERSION1 = "5:cpu:/\n4:memory:/job/step\n0::/\n"
CASES: dict[str, tuple[str, Mapping[str, str], int]] = {
    "version 2": (UNIFIED, {"job/step/memory.max": "300", "job/step/memory.current": "100"}, 200),
    "version 2 without a limit": (UNIFIED, {"job/step/memory.max": "max", "job/step/memory.current": "100"}, HOST),
    "a limit of the group above": (
        UNIFIED,
        {
            "job/memory.max": "50",
            "job/memory.current": "20",
            "job/step/memory.max": "300",
            "job/step/memory.current": "9",
        },
        30,
    ),
    "contents of files on disk": (
        UNIFIED,
        {
            "job/step/memory.max": "300",
            "job/step/memory.current": "300",
            "job/step/memory.stat": "anon 5\ninactive_file 40\nactive_file 2\n",
        },
        42,
    ),
    "more than the limit is used": (UNIFIED, {"job/memory.max": "10", "job/memory.current": "11"}, 0),
    "version 1": (
        VERSION1,
        {
            "memory/job/step/memory.limit_in_bytes": "300",
            "memory/job/step/memory.usage_in_bytes": "200",
            "memory/job/step/memory.stat": "inactive_file 7\ntotal_inactive_file 40\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "500",
        },
        140,
    ),
    "a container, which has no folder of that path": (
        VERSION1,
        {"memory/memory.limit_in_bytes": "300", "memory/memory.usage_in_bytes": "200"},
        100,
    ),
    "a path above the container": ("0::/../other\n", {"memory.max": "300", "memory.current": "200"}, 100),
    "files without numbers": (UNIFIED, {"job/step/memory.max": "", "job/step/memory.current": "x"}, HOST),
    "no groups": ("", {}, HOST),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_that_of_the_smallest_group(case: str, tmp_path: Path) -> None:
    cgroup, files, wanted = CASES[case]
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "cgroup").write_text(cgroup)
    root = tmp_path / "groups"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    assert available_memory(tmp_path / "meminfo", tmp_path / "cgroup", root) == wanted + SWAP


def test_without_proc_it_is_not_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "meminfo") is None


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(MemoryError, match=rf"{1 << 60} bytes of values do not fit into the \d+ bytes"):
        require_available(1 << 60)
    require_available(1 << 20)


def test_memory_that_other_ranks_are_about_to_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have checked that there is memory for a step, and be stopped in the middle of writing it."""
    step, steps, others = 1 << 20, 12, 7 << 20
    free = steps * step + others
    taken = 0  # by others, before the last step
    writev = os.writev

    def write(descriptor: int, pieces: Sequence[memoryview]) -> int:
        nonlocal free
        nbytes = writev(descriptor, pieces)
        free -= nbytes
        if free == others + step:
            free -= taken
        return nbytes

    for module in (_memory, shared_memory):
        monkeypatch.setattr(module, "CHECKED_BYTES", 4 * step)
    monkeypatch.setattr(shared_memory, "_MAX_BYTES", step)
    monkeypatch.setattr(shared_memory, "_OTHERS_BYTES", others)
    monkeypatch.setattr(_memory, "available_memory", lambda: free)
    monkeypatch.setattr(os, "writev", write)

    data = [np.ones(steps * step, np.uint8)]
    shared_memory.SharedFile(data).close()
    assert free == others
    free, taken = steps * step + others, 1
    with pytest.raises(MemoryError, match=f"do not fit into .*, of which {others} are for other processes"):
        shared_memory.SharedFile(data)
    assert free == others + step - 1  # the last step was not written
