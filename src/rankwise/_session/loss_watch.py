"""The end of communication between devices after a rank is lost.

With NCCL the host goes on after a collective, and waits for the device later, in code of torch: no exception can end
that wait, and NCCL ends it after minutes. So a thread looks for lost ranks where the main thread does not move, and
aborts the process groups. It does so after Ctrl-C too, whose handler has to wait for the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Final

from rankwise._comm.comm import Comm
from rankwise._torch import open_groups

log = logging.getLogger(__name__)

# The launcher gives the ranks that are left 3 s before SIGKILL. A rank that is killed while its device communicates
# over NVLink can make the other devices unusable.
_LOOK_SECONDS: Final = 0.5
_MIN_LOOKS: Final = 3
_ABORT_SECONDS: Final = 5.0


class LossWatch:
    """A thread that aborts the process groups of a session after a rank is lost, or this one is interrupted."""

    def __init__(self, comm: Comm) -> None:
        self._comm = weakref.ref(comm)
        self._ended = threading.Event()
        self._signals = _Signals()
        self._is_aborted = False
        self._thread = threading.Thread(target=self._run, name="rankwise: lost ranks", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Abort all process groups, also those of the program, each in a thread: one may wait for another."""
        if self._is_aborted:
            return
        self._is_aborted = True
        threads = [threading.Thread(target=group.abort, daemon=True) for group in open_groups()]
        for thread in threads:
            thread.start()
        _join(threads)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        _join([self._thread])
        self._signals.close()

    def _run(self) -> None:
        # A rank may end without leaving, at the end of its program, while this one still computes: nothing is aborted
        # unless the main thread has not moved since the last looks.
        place, num_looks, is_interrupted = _place_of_main_thread(), 0, False
        while not self._ended.wait(_LOOK_SECONDS):
            before, place = place, _place_of_main_thread()
            num_looks = num_looks + 1 if place == before else 0
            is_interrupted = (is_interrupted and num_looks > 0) or self._signals.take_interrupt()
            comm = self._comm()
            lost = "" if comm is None or num_looks < _MIN_LOOKS else comm.control.dead_ranks(failed=True)
            del comm
            if is_interrupted and num_looks >= _MIN_LOOKS:
                lost = "interrupted"
            if lost:
                log.error("%s: the communication of this rank's device is aborted", lost)
                self.abort()
                return


class _Signals:
    """The signals of this process, as its C handlers write them: before the main thread can run a handler of Python.

    None, where other code reads them, as an event loop of asyncio does, or this is not the main thread.
    """

    def __init__(self) -> None:
        self._read = self._write = -1
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)

    def take_interrupt(self) -> bool:
        """Return whether Ctrl-C was among the signals since the last call."""
        with contextlib.suppress(OSError):  # none, or none can be read
            return signal.SIGINT in os.read(self._read, 1 << 10)
        return False

    def close(self) -> None:
        """Read no more signals."""
        if self._write == -1 or threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(-1)
        if before not in {-1, self._write}:
            signal.set_wakeup_fd(before)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1


def _place_of_main_thread() -> tuple[int, int]:
    """Return where the main thread is, the same as long as it waits in compiled code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_ABORT_SECONDS)
