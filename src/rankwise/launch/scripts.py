"""Starting ranks that run a script or a module, as `python` does."""

from __future__ import annotations

from collections.abc import Sequence

from rankwise.errors import RankFailedError
from rankwise.launch.plan import Plan, check_nproc, module_command, script_command
from rankwise.launch.report import describe


def launch_script(target: str, args: Sequence[str], *, nproc: int, module: bool) -> None:
    """Run a script, or a module, as the ranks of one world on this host.

    Args:
        target: The script's path, or the module's name.
        args: What follows it on the command line.
        nproc: How many ranks.
        module: Whether the target is a module.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run; there is no such script.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: The ranks could not be started.
    """
    check_nproc(nproc)
    command = module_command(target, args) if module else script_command(target, args)
    plan = Plan(nproc=nproc, command=command)

    from rankwise.launch.agent import run  # noqa: PLC0415 - imports torch, which a wrong argument need not wait for

    failures = run(plan)
    if failures:
        raise RankFailedError(describe(failures, nproc), failures=failures)
