"""Ranks that wait in a collective without sleeping, as NCCL and other backends do.

Their main threads run all the time, so the kernel's counts do not show that they wait. Torch's flight record does: the
same collectives are pending. Where there is none, the stack has to be the same, in a collective or in a wait for an
accelerator, whenever it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rankwise._diagnose import py_spy
from rankwise._diagnose.flight_record import request_pending
from rankwise._diagnose.processes import has_communicator
from rankwise._diagnose.stack import Stack

# How often ranks are asked in the time after which a wait is reported, and the shortest pause.
_LOOKS: Final = 4
_SHORTEST_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 0.5


@dataclass(slots=True)
class PollingWaits:
    """For how long processes that run have been in the same collectives.

    Attributes:
        seconds: After how many seconds a wait is reported.
    """

    seconds: float
    _last: float = float("-inf")
    _since: dict[int, tuple[object, float]] = field(default_factory=dict)

    def update(self, running: Iterable[int], now: float) -> Mapping[int, float]:
        """Look at processes again if it is time, and return for how many seconds each has waited that does.

        Args:
            running: The processes whose main threads do not sleep.
            now: The time.
        """
        running = set(running)
        for pid in self._since.keys() - running:
            del self._since[pid]
        if now - self._last >= max(self.seconds / _LOOKS, _SHORTEST_SECONDS):
            self._last = now
            for pid in running:
                wait = _wait_of(pid)
                if wait is None:
                    self._since.pop(pid, None)
                elif self._since.get(pid, (None, now))[0] != wait:
                    self._since[pid] = wait, now
        # Seen at one look alone, a wait may have been over at once.
        return {pid: now - since for pid, (_, since) in self._since.items() if since < self._last}


def _wait_of(pid: int) -> object:
    """Return the collective that a process waits in, to be compared with the next look; None if it is in none."""
    pending = request_pending(pid, _ANSWER_SECONDS)
    if pending is not None:
        return pending or None
    # Without a signal, which could end a system call of a rank that is well.
    stack = py_spy.read_stack(pid)
    if not isinstance(stack, Stack) or not (stack.in_collective or (stack.reads_device and has_communicator(pid))):
        return None
    return tuple(stack.frames)
