"""The title of a process, as `ps` shows it. Linux reads it from the memory of the process's original arguments."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_PROCESS: Final = Path("/proc/self")
# The fields of `stat` with the addresses of the arguments, counted after the name, which may contain spaces.
_BEGIN, _END = 45, 46


def set_title(title: str) -> None:
    """Overwrite the arguments of this process with a title, cut to their length.

    Nothing changes where there is no /proc, or where it is another kernel's.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = (_PROCESS / "stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[_BEGIN]), int(fields[_END])
        room = end - begin - 2
        if room > 0:
            # If the last byte is not zero, the kernel shows the bytes up to the first zero as one string.
            text = os.fsencode(title)[:room].ljust(room + 1, b"\0") + b" "
            with (_PROCESS / "mem").open("r+b", buffering=0) as memory:
                memory.seek(begin)
                memory.write(text)
