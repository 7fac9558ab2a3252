"""The stack that a rank writes when it is asked: a handler in C, which needs neither Python's lock nor another process.

A rank prepares a file in memory and a handler of faulthandler for a signal. Another process of the same user opens the
file through /proc, sends the signal, and reads the stacks of all threads. It needs no rights of a debugger.

The name of the file has the facts of the rank: /proc shows the variables of the process that it was forked from.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TextIO

from rankwise._diagnose.processes import catches, descriptors_of, inner_pid

_NAME: Final = re.compile(r"/memfd:rankwise-rank:(\d+):(\d+):(\d+):(\d+)\b")
_THREAD: Final = re.compile(r"hread (0x[0-9a-f]+)")
# An unused real-time signal: those are queued, so that two requests give two answers.
STACK_SIGNAL: Final = signal.SIGRTMIN + 9 if sys.platform == "linux" else 0
_PAUSE_SECONDS: Final = 0.002


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
        or catches(os.getpid(), STACK_SIGNAL)
    ):
        return lambda: None
    name = f"rankwise-rank:{os.getpid()}:{rank}:{world_size}:{local_rank}:"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
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
        match = _NAME.match(target)
        if match is not None and int(match[1]) == inner_pid(pid):
            return MarkedRank(
                descriptor=descriptor, rank=int(match[2]), world_size=int(match[3]), local_rank=int(match[4])
            )
    return None


def request_stacks(pid: int, seconds: float) -> str:
    """Return the stacks of all threads of a rank or of a process that it has forked, as faulthandler writes them.

    Returns "" if it does not write any within that many seconds, or has no handler for that.
    """
    descriptor = next((number for number, to in descriptors_of(pid).items() if _NAME.match(to)), None)
    if descriptor is None or not catches(pid, STACK_SIGNAL):
        return ""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "r+", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return _request(pid, file, time.monotonic() + seconds)
    except OSError:  # it has ended
        return ""


def _request(pid: int, file: TextIO, deadline: float) -> str:
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
