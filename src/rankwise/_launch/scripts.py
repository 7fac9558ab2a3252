"""Launching a script, a module or a program, as a command does."""

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

# Exit statuses of a command.
_FOUND_A_FAULT: Final = 1
_MISUSED: Final = 2
_NOT_EXECUTABLE: Final = 126
_INTERRUPTED: Final = 130

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Terminated(SystemExit):
    """The launcher got a signal to end."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


def launch_target(spec: LaunchSpec, *, preload: bool = True, console: Console | None = None) -> None:
    """Run a script, a module or a program as the ranks of this host.

    Sets signal handlers while it runs, and so is for commands and not for libraries.

    Args:
        spec: The ranks to run.
        preload: Fork ranks from a process that has imported torch. Without that, each rank is a new interpreter.
        console: Shows the output of the ranks.

    Raises:
        InvalidArgumentError: There is no such script, module or program.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started.
        Terminated: A signal has stopped the launcher, after the ranks have ended.
        KeyboardInterrupt: Ctrl-C has stopped the launcher, after the ranks have ended.
    """
    check_target(spec.kind, spec.argv[0])
    require_torch("starting ranks")
    open_standard_streams()
    console = console or Console(nproc=spec.nproc)
    start = time.monotonic()
    console.show_status(f"rankwise: starting {spec.nproc} ranks")
    with (
        convert_resource_errors(),
        _terminated_by_signals(),
        Supervisor(spec.environ, console=console, preload=preload, owns_descendants=True) as supervisor,
    ):
        from rankwise._launch.agent import run_ranks  # noqa: PLC0415 - imports torch while the fork server does

        run_ranks(spec, supervisor)
    console.show_status(f"rankwise: {spec.nproc} ranks, {time.monotonic() - start:.1f} s", last=True)


def command_status(launch: Callable[[], None], *, name: str, console: Console) -> int:
    """Launch, print the error if there is one, and return the exit status of the command.

    Args:
        launch: The launch.
        name: The name of the command in messages.
        console: Shows the output of the ranks.
    """
    status, seconds = 0, SECONDS_TO_READ
    try:
        launch()
    except RankwiseError as error:
        console.print_message(f"{name}: {error}")
        status = _status(error)
    except (KeyboardInterrupt, Terminated) as stop:
        if isinstance(stop.__cause__, RankwiseError):
            console.print_message(f"{name}: {stop.__cause__}")
        status = stop.status if isinstance(stop, Terminated) else _INTERRUPTED
        seconds = SECONDS_TO_READ_AFTER_STOP
    try:
        lost = console.drain(seconds)
        for text in lost:
            console.print_message(f"{name}: {text}")
        console.drain(SECONDS_TO_READ_AFTER_STOP)
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

    # A signal that is ignored at the start, such as SIGHUP under nohup, stays ignored here and in ranks.
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, terminate) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
