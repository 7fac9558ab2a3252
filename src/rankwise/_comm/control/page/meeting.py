"""Meetings of a group's members through the memory of their page: none of them goes on before all have come.

They separate the steps of an operation on memory that the members share. A member writes the number of the meeting,
and looks whether it is the last one; the last one writes that number for all, and wakes those that sleep.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Final

from rankwise._comm.control.page.futex import Futex
from rankwise._comm.control.page.window import Window

# The longest sleep, after which a member looks whether others are lost.
_PAUSE_SECONDS: Final = 0.05
_LOW_WORD: Final = 0xFFFFFFFF


class PageMeeting:
    """The meetings of one group. Only the thread that holds the lock of the channel may use it."""

    def __init__(self, window: Window, own: int, spin_seconds: float) -> None:
        """Make the meetings of a group.

        Args:
            window: The window of the group.
            own: The group rank of this process.
            spin_seconds: How long a member waits without sleeping before it sleeps.
        """
        self._window = window
        self._own = own
        self._all = window.verdict_slot
        self._spin_seconds = spin_seconds
        address = ctypes.addressof(ctypes.c_char.from_buffer(window.met[self._all :]))
        self._futex = Futex(address + (0 if sys.byteorder == "little" else 4), pause=_PAUSE_SECONDS)
        self._number = 0

    def meet(self, on_pause: Callable[[float], None]) -> None:
        """Wait until all members have come to this meeting.

        Args:
            on_pause: Called while waiting, with the time on the monotonic clock when it began to sleep; it may raise.
        """
        window, met, slot_of_all = self._window, self._window.met, self._all
        self._number += 1
        number = self._number
        met[self._own] = number
        window.fence()  # before the look at the others: one of two that come at once has to see the other one
        if not self.missing():
            met[slot_of_all] = number
            window.fence()
            self._futex.wake()
            return
        until = time.perf_counter() + self._spin_seconds if self._spin_seconds else 0.0
        start = 0.0
        while (last := met[slot_of_all]) < number:
            if time.perf_counter() < until:
                continue
            start = start or time.monotonic()
            self._futex.wait(last & _LOW_WORD)
            if met[slot_of_all] < number:
                on_pause(start)
        window.fence()

    def missing(self) -> list[int]:
        """Return the members that have not come to the last meeting to which this one has come."""
        met = self._window.met[: self._all].tolist()
        return [member for member, last in enumerate(met) if last < self._number]
