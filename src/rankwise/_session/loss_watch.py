"""The end of communication between devices after a rank is lost.

With NCCL the host goes on after a collective, and waits for the device later, in code of torch: no exception can end
that wait, and NCCL ends it after minutes. So a thread looks for lost ranks where the main thread does not move, and
aborts the process groups.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Final

import torch.distributed as dist

from rankwise._comm.comm import Comm
from rankwise._comm.control.registry import GroupRegistry

log = logging.getLogger(__name__)

# The launcher gives the ranks that are left 3 s before SIGKILL. A rank that is killed while its device communicates
# over NVLink can make the other devices unusable.
_LOOK_SECONDS: Final = 0.5
_MIN_LOOKS: Final = 3
_ABORT_SECONDS: Final = 5.0


class LossWatch:
    """A thread that aborts the process groups of a session after a rank has died, or has left with an error."""

    def __init__(self, comm: Comm, registry: GroupRegistry, group: dist.ProcessGroup) -> None:
        self._comm = weakref.ref(comm)
        self._registry = registry
        self._group = weakref.ref(group)
        self._ended = threading.Event()
        self._is_aborted = False
        self._thread = threading.Thread(target=self._run, name="rankwise: lost ranks", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Abort the process groups that the session has opened, each in a thread: one may wait for another."""
        if self._is_aborted:
            return
        self._is_aborted = True
        found = [reference() for reference in (*self._registry.process_groups.values(), self._group)]
        threads = [threading.Thread(target=group.abort, daemon=True) for group in found if group is not None]
        for thread in threads:
            thread.start()
        _join(threads)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        _join([self._thread])

    def _run(self) -> None:
        # A rank may end without leaving, at the end of its program, while this one still computes: nothing is aborted
        # unless the main thread has not moved since the last looks.
        place, num_looks = _place_of_main_thread(), 0
        while not self._ended.wait(_LOOK_SECONDS):
            before, place = place, _place_of_main_thread()
            num_looks = num_looks + 1 if place == before else 0
            comm = self._comm()
            lost = "" if comm is None or num_looks < _MIN_LOOKS else comm.control.dead_ranks(failed=True)
            del comm
            if lost:
                log.error("%s: the communication of this rank's device is aborted", lost)
                self.abort()
                return


def _place_of_main_thread() -> tuple[int, int]:
    """Return where the main thread is, the same as long as it waits in compiled code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(_ABORT_SECONDS)
