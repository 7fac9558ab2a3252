"""Signals to the launcher that are about its ranks, which get none from a terminal, nor from a scheduler."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

_FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)


class Signalled(Protocol):
    """The ranks of a launch."""

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all ranks."""

    def suspend(self) -> None:
        """Stop all ranks until `resume`."""

    def resume(self) -> None:
        """Continue all ranks."""

    def request_stacks(self) -> None:
        """Let the stacks of all ranks be printed."""


@contextmanager
def forwarded_signals(ranks: Signalled, stopping: Collection[int]) -> Iterator[None]:
    """Forward signals in this block: for the main thread of a command.

    SIGTSTP, as by Ctrl-Z, stops the ranks with the processes that they have started, and then this process; SIGCONT, as
    by `fg`, continues them. SIGQUIT, as by Ctrl-\\, prints their stacks.

    Args:
        ranks: The ranks.
        stopping: The signals on which the ranks are stopped.
    """

    def forward(number: int, _: FrameType | None) -> None:
        ranks.signal_all(signal.Signals(number))

    def suspend(_: int, __: FrameType | None) -> None:
        # Not SIGTSTP: the group of a rank is an orphaned one, for which the kernel discards it.
        ranks.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)

    def resume(_: int, __: FrameType | None) -> None:
        ranks.resume()

    def show_stacks(_: int, __: FrameType | None) -> None:
        ranks.request_stacks()

    handlers = {
        **dict.fromkeys(_FORWARDED, forward),
        signal.SIGTSTP: suspend,
        signal.SIGCONT: resume,
        signal.SIGQUIT: show_stacks,
    }
    # A signal that is ignored at the start stays ignored here and in ranks.
    handled = [number for number in handlers if number not in stopping and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
