"""Signals to the launcher that are about its ranks, which get none from a terminal, nor from a scheduler."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, Protocol, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int

_FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)
# Slurm sends a signal to all processes of a job: these are about ranks, and for launchers.
FOR_RANKS: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, *_FORWARDED)


def leave_to_ranks() -> dict[signal.Signals, Handler]:
    """Let this process go on at signals about ranks, and return the handlers that it had.

    For processes between a launcher and its ranks: without them the ranks would be killed at once, before they have
    saved anything.
    """
    before: dict[signal.Signals, Handler] = {}
    for number in FOR_RANKS:
        handler = signal.getsignal(number)
        if handler is not None and handler is not signal.SIG_IGN:  # None is one of compiled code
            before[number] = handler
            signal.signal(number, lambda *_: None)
    return before


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

    def suspend() -> None:
        # Not SIGTSTP: the group of a rank is an orphaned one, for which the kernel discards it.
        ranks.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)

    actions: dict[int, Callable[[], None]] = {
        **{number: partial(ranks.signal_all, number) for number in _FORWARDED},
        signal.SIGTSTP: suspend,
        signal.SIGCONT: ranks.resume,
        signal.SIGQUIT: ranks.request_stacks,
    }
    pending: list[int] = []  # the first one is being forwarded

    def handle(number: int, _: FrameType | None) -> None:
        # An action may wait for a busy process, and handlers that interrupt each other would nest without limit. Here a
        # signal that comes meanwhile is pending, once, as one that is blocked.
        if number in pending[1:]:
            return
        is_first = not pending  # before it is added: another signal may interrupt this function anywhere
        try:
            pending.append(number)
            while is_first and pending:
                actions[pending[0]]()
                del pending[0]
        except BaseException:  # as by Ctrl-C, after which a launch with a debugger goes on
            pending.clear()
            raise

    # A signal that is ignored at the start stays ignored here and in ranks; but SIGQUIT, which a shell ignores for what
    # a script starts with `&`, ends nothing here.
    handled = [
        number
        for number in actions
        if number not in stopping and (number == signal.SIGQUIT or signal.getsignal(number) != signal.SIG_IGN)
    ]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
