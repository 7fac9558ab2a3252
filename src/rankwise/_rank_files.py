"""Files in memory by which a rank shows other processes of its user where it is: its stacks, and since when it waits.

The files have no path: another process finds them in /proc among the descriptors of the rank, whose names have the
facts of the rank, and opens them there. /proc shows the variables of the process that the rank was forked from.

*Stacks* are written when they are asked for: by a handler of faulthandler, in C, which needs neither Python's lock nor
another process. Who asks opens the file, sends the signal, and reads the stacks of all threads, without the rights of a
debugger.

*The collective that a rank waits in*: a rank that sleeps in a collective wakes up twice a second, and then notes it. It
does not erase the note afterwards, which would cost every collective time: one that is older than a wait is out of
date. The file is there from the start, so that the number of descriptors of a rank does not depend on its waits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

_RANK: Final = re.compile(r"/memfd:rankwise-rank:(\d+):(\d+):(\d+):(\d+)\b")
_THREAD: Final = re.compile(r"hread (0x[0-9a-f]+)")
# An unused real-time signal: those are queued, so that two requests give two answers.
STACK_SIGNAL: Final = signal.SIGRTMIN + 9 if sys.platform == "linux" else 0
_PAUSE_SECONDS: Final = 0.002
_WAIT: Final = re.compile(r"/memfd:rankwise-wait:(\d+):")
# Shorter waits are not noted.
_FIRST_SECONDS: Final = 1.0
_OUT_OF_DATE_SECONDS: Final = 2.0
_MAX_NOTE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedRank:
    """A rank that can write its stacks, and its descriptor of the file."""

    descriptor: int
    rank: int
    world_size: int
    local_rank: int


def offer_stacks(*, rank: int, world_size: int, local_rank: int) -> Callable[[], None]:
    """Let other processes of this user request the stacks of this one; return the function that ends that.

    Changes the handler of one real-time signal; if the program has one of its own, nothing is changed.
    """
    if (
        sys.platform != "linux"
        or signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL
        or _catches(os.getpid(), STACK_SIGNAL)
    ):
        return lambda: None
    name = f"rankwise-rank:{os.getpid()}:{rank}:{world_size}:{local_rank}:"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    import fcntl  # noqa: PLC0415 - not on Windows, which has no such files

    # At its end, wherever a request has cut the file.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)

    def withdraw() -> None:
        faulthandler.unregister(STACK_SIGNAL)
        with suppress(OSError):  # the program has closed all descriptors
            os.close(descriptor)

    return withdraw


def marked_rank(pid: int) -> MarkedRank | None:
    """Return the facts of a rank that can write its stacks; None for other processes, also for its children."""
    for descriptor, target in descriptors_of(pid).items():
        match = _RANK.match(target)
        if match is not None and int(match[1]) == inner_pid(pid):
            return MarkedRank(
                descriptor=descriptor, rank=int(match[2]), world_size=int(match[3]), local_rank=int(match[4])
            )
    return None


def request_stacks(pid: int, seconds: float) -> str:
    """Return the stacks of all threads of a rank or of a process that it has forked, as faulthandler writes them.

    Returns "" if it does not write any within that many seconds, or has no handler for that.
    """
    descriptor = next((number for number, to in descriptors_of(pid).items() if _RANK.match(to)), None)
    if descriptor is None or not _catches(pid, STACK_SIGNAL):
        return ""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "r+", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return _request(pid, file, time.monotonic() + seconds)
    except OSError:  # it has ended
        return ""


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
            os.pwrite(self._descriptor, text[:_MAX_NOTE_BYTES], 0)

    def close(self) -> None:
        """Remove the note."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def read_wait(pid: int) -> Wait | None:
    """Return the wait of a rank in a collective of rankwise; None if there is none, or only since a second."""
    for descriptor, target in descriptors_of(pid).items():
        match = _WAIT.match(target)
        if match is None or int(match[1]) != inner_pid(pid):
            continue
        with suppress(OSError, ValueError):  # it has ended, or has not written yet
            with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:  # noqa: PTH123
                written, start, call = (
                    file.read(_MAX_NOTE_BYTES).partition(b"\0")[0].decode(errors="replace").split(" ", 2)
                )
            now = time.monotonic()
            if now - float(written) < _OUT_OF_DATE_SECONDS:
                return Wait(call, now - float(start))
    return None


def descriptors_of(pid: int) -> dict[int, str]:
    """Return the targets of the descriptors of a process; none if they cannot be read."""
    targets: dict[int, str] = {}
    with suppress(OSError):  # it ends meanwhile, or belongs to another user
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError, ValueError):  # it has closed this one: so does this process after its own listing
                targets[int(entry.name)] = str(entry.readlink())
    return targets


def inner_pid(pid: int) -> int:
    """Return the process id that a process has for itself: another one in a container."""
    ids = status_field(pid, "NSpid").split()
    return int(ids[-1]) if ids else pid


def status_field(pid: int, name: str) -> str:
    """Return a field of what the kernel knows of a process; "" if it cannot be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith(f"{name}:")), "")


def _request(pid: int, file: TextIO, deadline: float) -> str:
    import fcntl  # noqa: PLC0415 - as above

    while True:  # another request may be under way, also for a fork with the same file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                return ""
            time.sleep(_PAUSE_SECONDS)
    file.truncate(0)
    # The main thread answers twice: when the second answer has begun, the first one is complete.
    for _ in range(2):
        if ctypes.CDLL(None).tgkill(pid, pid, STACK_SIGNAL):
            return ""
    while time.monotonic() < deadline:
        file.seek(0)
        text = file.read()
        ids = [(match[1], match.start()) for match in _THREAD.finditer(text)]
        again = next((start for index, (thread, start) in enumerate(ids) if index and thread == ids[0][0]), None)
        if again is not None:
            return text[: text.rfind("\n", 0, again) + 1]
        time.sleep(_PAUSE_SECONDS)
    return ""


def _catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return bool(int(status_field(pid, "SigCgt") or "0", 16) >> (signum - 1) & 1)
