"""The memory of a page, as one process maps it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from rankwise._comm.control.page.layout import window_bytes
from rankwise._comm.control.page.memory import PageMemory


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:rankwise")


@pytest.mark.parametrize("largest", [2, 126])
def test_windows_of_an_area_follow_each_other(largest: int) -> None:
    length = window_bytes(largest)
    descriptor = os.memfd_create("rankwise")
    os.ftruncate(descriptor, 1 << 40)
    memory = PageMemory(descriptor, directory_bytes=mmap.PAGESIZE, window_bytes=length)
    before = num_mappings()
    numbers = [*range(20), *range(250, 260), 766, 767, 768, 999]
    for number in numbers:
        with memory.open_window(number) as view:
            view[:2] = number.to_bytes(2, "little")
            view[-2:] = number.to_bytes(2, "little")
    for number in numbers:
        first = memory.window_offset(number)
        for offset in (first, first + length - 2):
            assert int.from_bytes(memory.read(offset, 2), "little") == number
        memory.close_window(number)
    assert num_mappings() == before
    memory.close()
