"""A control group with little memory, for tests of its limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a group, of version 1 or 2, whose processes have so many bytes, or skip the test where none can be made."""
    version1 = CGROUPS / "memory"
    group = (version1 if version1.is_dir() else CGROUPS) / f"rankwise-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made: {error}")
    try:
        file = group / ("memory.limit_in_bytes" if version1.is_dir() else "memory.max")
        if not file.exists():
            pytest.skip("control groups have no limit of memory here")
        file.write_text(str(limit))
        yield group
    finally:
        group.rmdir()
