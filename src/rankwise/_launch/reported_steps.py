"""What ranks report to their launcher, such as their steps: in a page of memory, so that a report costs no message.

Each rank has a place of 8 bytes, and finds it by a variable; so do the processes that it starts. The launcher reads the
places when an attempt has failed. Behind them is a second place for each rank, for the timeout of its session: so long
a launcher on several hosts waits for another host. A third one has why its `Stop` has ended the loop: an engine starts
such a job again. Where the system has no files in memory, nothing is reported.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Final

# Set in the ranks of a launch that may restart them: process, descriptor and inode of the file, and the rank's place.
PROGRESS: Final = "RANKWISE_PROGRESS"
# The file has the step plus one, since 0 is that none was reported.
LARGEST_STEP: Final = (1 << 63) - 2

_CREATE: Final = getattr(os, "memfd_create", None)
# Why a rank has stopped, in place of a signal: its job comes to its time limit.
JOB_LIMIT: Final = -1

_PLACE_BYTES: Final = 8
# Step, timeout, reason to stop.
_PLACES: Final = 3
_LONGEST_TIMEOUT: Final = 1e9


class ReportedSteps:
    """What the ranks of this host report, in the launcher."""

    def __init__(self, nproc: int) -> None:
        """Allocate the memory; with nproc=0 there is none."""
        self._descriptor = -1
        if _CREATE is not None and nproc:
            self._descriptor = _CREATE("rankwise-progress", os.MFD_CLOEXEC)
            os.truncate(self._descriptor, _PLACES * nproc * _PLACE_BYTES)
            self._memory = mmap.mmap(self._descriptor, _PLACES * nproc * _PLACE_BYTES)

    def variables(self, place: int) -> dict[str, str]:
        """Return the variable by which a rank finds its place."""
        if self._descriptor < 0:
            return {}
        inode = os.fstat(self._descriptor).st_ino
        return {PROGRESS: f"{os.getpid()} {self._descriptor} {inode} {place}"}

    def take_highest(self) -> int | None:
        """Return the highest step that a rank has reported since the last call; None if none has."""
        if self._descriptor < 0:
            return None
        with memoryview(self._memory) as view, view.cast("q") as steps:
            highest = max(steps[: len(steps) // _PLACES])
        self._memory[:] = bytes(len(self._memory))
        return highest - 1 if highest else None

    def longest_timeout(self) -> float | None:
        """Return the longest timeout in seconds of a rank's session; None if no rank has opened one."""
        if self._descriptor < 0:
            return None
        with memoryview(self._memory) as view, view.cast("q") as places:
            ranks = len(places) // _PLACES
            return max(places[ranks : 2 * ranks]) / 1000 or None

    def stopped_by(self) -> int:
        """Return why a rank has stopped: the number of a signal, or `JOB_LIMIT`; 0 if none has."""
        if self._descriptor < 0:
            return 0
        with memoryview(self._memory) as view, view.cast("q") as places:
            return next(filter(None, places[2 * len(places) // _PLACES :]), 0)

    def close(self) -> None:
        """Release the memory. Ranks that still have it keep it."""
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


def report_timeout(variable: str, seconds: float) -> None:
    """Report the timeout of this rank's session, given the variable, if its launcher wants to know."""
    found = _mapped(variable)
    if found is not None:
        places, place = found
        places[len(places) // _PLACES + place] = round(min(seconds, _LONGEST_TIMEOUT) * 1000)


def report_stop(variable: str, reason: int) -> None:
    """Report why this rank stops, as `ReportedSteps.stopped_by` has it, given the variable."""
    found = _mapped(variable)
    if found is not None:
        places, place = found
        places[2 * len(places) // _PLACES + place] = reason


def own_place(variable: str) -> Callable[[int], None] | None:
    """Return the function that reports a step of this rank, given the variable; None if its launcher cannot be told.

    Processes in a container of their own have the variable, but not the file.
    """
    found = _mapped(variable)
    if found is None:
        return None
    steps, place = found

    def report(step: int) -> None:
        if step >= steps[place]:
            steps[place] = step + 1  # one store of the processor: the rank may be killed at any time

    return report


def _mapped(variable: str) -> tuple[memoryview, int] | None:
    """Return the memory, and the place of this rank."""
    try:
        process, descriptor, inode, place = map(int, variable.split())
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except (ValueError, OSError):
        return None
    try:
        status = os.fstat(own)
        if status.st_ino != inode or not 0 <= place < status.st_size // (_PLACES * _PLACE_BYTES):
            return None  # the launcher has ended, and another process has its number
        return memoryview(mmap.mmap(own, status.st_size)).cast("q"), place
    finally:
        os.close(own)
