"""The terminal of the launcher, lent to one rank at a time: to a debugger in that rank."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.output.console import Console
from rankwise._launch.output.pipes import OutputPipes
from rankwise._net.pausable_timeouts import TimeoutPause

# A rank that returns the terminal, as at each step of a debugger, has it again if it asks within this time.
_STEP_SECONDS: Final = 0.3
# How long a slow terminal may take to show what ranks have printed before.
_SECONDS_TO_SHOW: Final = 1.0


class Terminal:
    """The terminal that standard input is, if it is one, and the rank that has it.

    Attributes:
        holder: The rank that has the terminal, or may have it again in a moment; None if there is none.
    """

    def __init__(
        self, ranks: Mapping[int, LaunchedRank], pipes: OutputPipes, console: Console, pause: TimeoutPause
    ) -> None:
        self.holder: int | None = None
        self._ranks = ranks
        self._pipes = pipes
        self._console = console
        self._pause = pause
        self._waiting: deque[int] = deque()
        self._returned_at = 0.0  # when the holder has returned it; 0 while the holder uses it
        self._descriptor: int | None = None
        self._modes: list[Any] = []

    def request(self, rank: int, *, wanted: bool) -> None:
        """Lend the terminal to a rank, now or after others; or take it back."""
        if not wanted:
            self._restore()
            self._returned_at = time.monotonic()
        elif self.holder in {None, rank}:
            self._lend(rank)
        else:
            self._waiting.append(rank)

    def update(self) -> float:
        """Lend the terminal to the next rank if it is time, and return the seconds until the next call."""
        if self.holder is None:
            return _SECONDS_TO_SHOW
        has_ended = not self._ranks[self.holder].is_running
        left = self._returned_at + _STEP_SECONDS - time.monotonic() if self._returned_at else _SECONDS_TO_SHOW
        if left > 0 and not has_ended:
            return left
        self._take_back()
        if any(rank.has_failed for rank in self._ranks.values()):  # such as by `quit`, which is meant for the whole job
            self._waiting.clear()
        while self._waiting and self.holder is None:
            rank = self._waiting.popleft()
            if self._ranks[rank].is_running:
                self._lend(rank)
        return _SECONDS_TO_SHOW

    @property
    def is_used(self) -> bool:
        """A rank has the terminal, which Ctrl-C is for."""
        return self.holder is not None and not self._returned_at

    def close(self) -> None:
        """Take the terminal back, and lend it no more."""
        self._waiting.clear()
        if self.holder is not None:
            self._take_back()

    def _lend(self, rank: int) -> None:
        if self.holder is None:
            self.holder = rank
            self._pause.begin()
            self._descriptor = _open_terminal()
            if self._descriptor is not None:
                self._console.hold(rank)
                if len(self._ranks) > 1:
                    self._console.print_message(f"rankwise: rank {rank} is in the debugger, and the others wait")
        self._returned_at = 0.0
        borrower = self._ranks[rank]
        self._pipes.read_now()
        borrower.output.flush()
        borrower.errors.flush()
        self._console.screen.wait_until_written(_SECONDS_TO_SHOW)
        with contextlib.suppress(OSError):  # it has ended
            if self._descriptor is None:
                borrower.connection.send(b"\0")
            else:
                self._modes = termios.tcgetattr(self._descriptor)
                socket.send_fds(borrower.connection, [b"\1"], [self._descriptor])

    def _take_back(self) -> None:
        self._restore()
        self.holder = None
        self._returned_at = 0.0
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._console.release()
        self._pause.end()

    def _restore(self) -> None:
        """Restore the modes of the terminal, which a rank may have left in the middle of a line."""
        if self._modes and self._descriptor is not None:
            with contextlib.suppress(termios.error):  # it is closed
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._modes)
        self._modes = []


def _open_terminal() -> int | None:
    """Return a new descriptor of the terminal that standard input is; None if it is none."""
    try:
        descriptor = sys.__stdin__.fileno() if sys.__stdin__ is not None else -1
        name = os.ttyname(descriptor)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        return os.open(name, os.O_RDWR | os.O_NOCTTY)
    return os.dup(descriptor)  # a terminal of another mount namespace
