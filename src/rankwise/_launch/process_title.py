"""The title of a process: what `ps` shows of it, which Linux keeps where the arguments are that it was started with."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_PROCESS: Final = Path("/proc/self")
# The fields of `stat` that say where the arguments begin and end, counted after the name, which may have spaces in it.
_BEGIN, _END = 45, 46


def set_title(title: str) -> None:
    """Write a title over the arguments of this process, as much as there is room for.

    Where there is no /proc, or it belongs to another kernel, nothing is changed.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (_PROCESS / "stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[_BEGIN]), int(fields[_END])
        room = end - begin - 2
        if room > 0:
            # If the last byte is no zero, the kernel takes all up to the first zero for a title.
            text = os.fsencode(title)[:room].ljust(room + 1, b"\0") + b" "
            with (_PROCESS / "mem").open("r+b", buffering=0) as memory:
                memory.seek(begin)
                memory.write(text)
