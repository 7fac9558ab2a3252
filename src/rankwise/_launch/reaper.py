"""Ending processes so that none is left: a child of a child, one in a session of its own, one that is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final

import psutil

# Processes that started under one launcher know it by this variable.
MARK: Final = "RANKWISE_LAUNCH"

_SET_DEATH_SIGNAL: Final = 1
_SET_SUBREAPER: Final = 36
# A process in the kernel's hands (a disk that does not answer) dies when that lets go of it, and not before.
_SECONDS: Final = 5.0
# So one who waits for another process to do that waits longer.
SECONDS_TO_END: Final = 8.0
_PAUSE_SECONDS: Final = 0.005
# What psutil raises where there is no /proc, or an empty one, as in some containers.
_NO_PROC: Final = (OSError, IndexError)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_SET_SUBREAPER, 1)


def die_with_parent() -> None:
    """Die by SIGKILL when the parent does, however that ends."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def end_descendants(known: Iterable[int] = ()) -> None:
    """Kill all descendants of this process, which adopts orphans, and reap them.

    Args:
        known: Some of them, which lead process groups. Where there is no /proc, these groups are all that can be found.
    """
    try:
        _until_none_is_left(lambda: psutil.Process().children(recursive=True))
    except (*_NO_PROC, psutil.NoSuchProcess):
        for pid in known:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def end_marked(launch: str) -> None:
    """Kill every process that started under a launcher, known by its mark, but for this one."""

    def marked() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(MARK) == launch:
                    found.append(process)
        return found

    with contextlib.suppress(*_NO_PROC):
        _until_none_is_left(marked)


def _until_none_is_left(find: Callable[[], list[psutil.Process]]) -> None:
    deadline = time.monotonic() + _SECONDS
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()
        time.sleep(_PAUSE_SECONDS)


def reap() -> list[tuple[int, int]]:
    """Reap the children that have ended, and return their process numbers and exit codes."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _prctl(option: int, value: int) -> None:
    """Ask Linux; elsewhere there is nobody to ask, and only the fork server's own children are known to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
