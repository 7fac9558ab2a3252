"""Starting ranks that run a script, a module or a program."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from rankwise._dependencies import require_torch
from rankwise._launch.output import SECONDS_TO_READ, SECONDS_TO_READ_AFTER_STOP, Console
from rankwise._launch.report import exit_status
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.spec import LaunchSpec
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._launch.supervisor import Supervisor
from rankwise._launch.targets import NotExecutableError, check_target
from rankwise.errors import InvalidArgumentError, RankFailedError, RankwiseError

# A command's exit statuses.
_FOUND_A_FAULT: Final = 1
_MISUSED: Final = 2
_NOT_EXECUTABLE: Final = 126
_INTERRUPTED: Final = 130

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Terminated(SystemExit):
    """The launcher was told to end."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


def launch_target(plan: LaunchSpec, *, preload: bool = True, screen: Console | None = None) -> None:
    """Run a script, a module or a program as the ranks of this host.

    Sets signal handlers while it runs: it is what a command does, and not a library's function.

    Args:
        plan: What to run.
        preload: Fork ranks from a process that has torch loaded; if not, each is a fresh interpreter.
        screen: Where what they print is shown, and how.

    Raises:
        InvalidArgumentError: There is no such script, module or program.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started.
        Terminated: By a signal, after the ranks have ended.
        KeyboardInterrupt: By Ctrl-C, after the ranks have ended.
    """
    check_target(plan.kind, plan.argv[0])
    require_torch("starting ranks")
    open_standard_streams()
    screen = screen or Console(nproc=plan.nproc)
    start = time.monotonic()
    screen.note(f"rankwise: starting {plan.nproc} ranks")
    with (
        convert_resource_errors(),
        _terminated_by_signals(),
        Supervisor(plan.environ, screen=screen, preload=preload, owner=True) as pool,
    ):
        from rankwise._launch.agent import run_ranks  # noqa: PLC0415 - imports torch while the fork server does

        run_ranks(plan, pool)
    screen.note(f"rankwise: {plan.nproc} ranks, {time.monotonic() - start:.1f} s", last=True)


def command_status(launch: Callable[[], None], *, name: str, screen: Console) -> int:
    """Return the exit status of a command that launches, after saying what went wrong.

    Args:
        launch: What it does.
        name: What it calls itself.
        screen: Where the output of the ranks is shown.
    """
    status, seconds = 0, SECONDS_TO_READ
    try:
        launch()
    except RankwiseError as error:
        screen.say(f"{name}: {error}")
        status = _status(error)
    except (KeyboardInterrupt, Terminated) as stop:
        if isinstance(stop.__cause__, RankwiseError):
            screen.say(f"{name}: {stop.__cause__}")
        status = stop.status if isinstance(stop, Terminated) else _INTERRUPTED
        seconds = SECONDS_TO_READ_AFTER_STOP
    try:
        lost = screen.drain(seconds)
        for text in lost:
            screen.say(f"{name}: {text}")
        screen.drain(SECONDS_TO_READ_AFTER_STOP)
    except KeyboardInterrupt:
        return status or _INTERRUPTED
    return status or (_FOUND_A_FAULT if lost else 0)


def _status(error: RankwiseError) -> int:
    if isinstance(error, RankFailedError):
        return exit_status(error.failures[0])
    if isinstance(error, NotExecutableError):
        return _NOT_EXECUTABLE
    return _MISUSED if isinstance(error, InvalidArgumentError) else _FOUND_A_FAULT


@contextmanager
def _terminated_by_signals() -> Iterator[None]:
    def terminate(number: int, _: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    # What is ignored at the start stays so, as SIGHUP under nohup, here and in ranks.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, terminate) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
