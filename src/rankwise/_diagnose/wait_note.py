"""The collective that a rank waits in, and since when: a note for other processes of this user.

A rank that sleeps in a collective wakes up twice a second, and then writes the note into a file in memory. It does not
erase it afterwards, which would cost every collective time: a note that is older than a wait is out of date. The file
is there from the start, so that the number of descriptors of a rank does not depend on how long it has waited.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from rankwise._diagnose.processes import descriptors_of, inner_pid

_NAME: Final = re.compile(r"/memfd:rankwise-wait:(\d+):")
# Shorter waits are not noted.
_FIRST_SECONDS: Final = 1.0
_OUT_OF_DATE_SECONDS: Final = 2.0
_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of a rank.

    Attributes:
        call: The operation and its call site: "all_reduce at train.py:88".
        seconds: For how long.
    """

    call: str
    seconds: float


class WaitNote:
    """The note of this rank."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._pid = os.getpid()
        if sys.platform == "linux":
            with suppress(OSError):  # no descriptor is left: there is no note
                self._descriptor = os.memfd_create(f"rankwise-wait:{self._pid}:", os.MFD_CLOEXEC)

    def write(self, call: str, start: float) -> None:
        """Note that this rank has been in a collective since that time of the monotonic clock."""
        now = time.monotonic()
        if now - start < _FIRST_SECONDS or self._descriptor < 0 or self._pid != os.getpid():
            return
        with suppress(OSError):  # the program has closed it
            text = f"{now} {start} {call}\0".encode(errors="replace")
            os.pwrite(self._descriptor, text[:_MAX_BYTES], 0)

    def close(self) -> None:
        """Remove the note."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def read_wait(pid: int) -> Wait | None:
    """Return the wait of a rank in a collective of rankwise; None if there is none, or only since a second."""
    for descriptor, target in descriptors_of(pid).items():
        match = _NAME.match(target)
        if match is None or int(match[1]) != inner_pid(pid):
            continue
        with suppress(OSError, ValueError):  # it has ended, or has not written yet
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # noqa: PTH123
                written, start, call = file.read(_MAX_BYTES).partition(b"\0")[0].decode(errors="replace").split(" ", 2)
            now = time.monotonic()
            if now - float(written) < _OUT_OF_DATE_SECONDS:
                return Wait(call, now - float(start))
    return None
