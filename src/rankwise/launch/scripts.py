"""Starting ranks that run a script, a module or a program."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from rankwise.launch.output import Screen
from rankwise.launch.plan import Nodes, Plan, check_nproc, check_program, check_script, common_environ
from rankwise.launch.pool import Pool

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Terminated(SystemExit):
    """The launcher was told to end."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


def launch_script(
    target: str,
    args: Sequence[str],
    *,
    nproc: int,
    kind: str = "script",
    preload: bool = True,
    max_restarts: int = 0,
    nodes: Nodes | None = None,
    screen: Screen | None = None,
) -> None:
    """Run a script, a module or a program as the ranks of this host.

    Sets signal handlers while it runs: it is what a command does, and not a library's function.

    Args:
        target: The script's path, or the module's or program's name.
        args: What follows it on the command line.
        nproc: How many ranks.
        kind: "script", "module" or "program".
        preload: Fork ranks from a process that has torch loaded; if not, each is a fresh interpreter.
        max_restarts: How often all ranks are started again after one failed.
        nodes: The other hosts of the world, where a launcher runs too; there are none by default.
        screen: Where what they print is shown, and how.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run; there is no such script.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started.
        Terminated: By a signal, after the ranks have ended.
        KeyboardInterrupt: By Ctrl-C, after the ranks have ended.
    """
    check_nproc(nproc)
    environ = common_environ(nproc, one_host=nodes is None)
    plan = Plan(nproc=nproc, kind=kind, argv=(target, *args), max_restarts=max_restarts, nodes=nodes, environ=environ)
    launch_plan(plan, preload=preload, screen=screen)


def launch_plan(plan: Plan, *, preload: bool = True, screen: Screen | None = None) -> None:
    """Run what a plan says, which is not a function, as a command does: see `launch_script`."""
    if plan.kind == "script":
        check_script(plan.argv[0])
    elif plan.kind == "program":
        check_program(plan.argv[0])
    screen = screen or Screen(nproc=plan.nproc)
    start = time.monotonic()
    screen.note(f"rankwise: starting {plan.nproc} ranks")
    with _terminated_by_signals(), Pool(plan.environ, screen=screen, preload=preload, owner=True) as pool:
        from rankwise.launch.agent import run  # noqa: PLC0415 - imports torch while the fork server does

        run(plan, pool)
    screen.note(f"rankwise: {plan.nproc} ranks, {time.monotonic() - start:.1f} s", last=True)


@contextmanager
def _terminated_by_signals() -> Iterator[None]:
    def terminate(number: int, _: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    before = {number: signal.signal(number, terminate) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
