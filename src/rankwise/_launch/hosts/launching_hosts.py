"""A script, a module, a program or a function in ranks of several hosts, started from one terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rankwise._launch.forwarded_signals import forwarded_signals
from rankwise._launch.hosts.hosts_launch import HostsLaunch, nodes_of
from rankwise._launch.hosts.launcher import HostJob
from rankwise._launch.hosts.ssh_command import DEFAULT_SSH, SSH_VARIABLE, HostCommand, host_commands
from rankwise._launch.one_host import function_target, run_on_this_host
from rankwise._launch.options import Options
from rankwise._launch.output.console import SECONDS_TO_READ
from rankwise._launch.output.settings import Output
from rankwise._launch.preload import Preload, caller_source
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.scripts import ScriptLaunch, command_status, run_script, terminated_by_signals
from rankwise._launch.spec import own_environ
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._launch.targets import read_piped
from rankwise._pickling import loads

R = TypeVar("R")


def run_on_hosts_as_command(launch: ScriptLaunch, commands: Sequence[HostCommand], name: str) -> int:
    """Run a target in ranks of several hosts, as `ScriptLaunch.run_as_command` does on one; return the exit status.

    Args:
        launch: The launch of each host, whose `nodes` are those of the terminal.
        commands: How the watchdogs of the hosts are started.
        name: The name of the command, which its messages begin with.
    """
    most = 1 if launch.nodes is None else launch.nodes.num_nodes
    console = launch.output.console(launch.nproc * most, in_files=False)

    def run() -> None:
        open_standard_streams()
        source = read_piped(launch.target) if launch.kind == "script" else None
        job = HostJob(options=launch, run=partial(run_script, launch, owns_descendants=True, source=source))
        started = HostsLaunch(job, commands, console)
        with (
            convert_resource_errors(),
            terminated_by_signals(launch.signals),
            forwarded_signals(started, launch.signals),
        ):
            started.run()

    return command_status(run, name=name, console=console)


def launch_on_hosts(
    fn: Callable[..., R],
    args: Sequence[Any],
    *,
    hosts: Sequence[str],
    nproc: int | None,
    output: Output | None,
    preload: Preload,
    max_restarts: int,
    timeout: float | None,
    environ: Mapping[str, str] | None,
    hang_dir: str,
) -> list[R]:
    """Run a function in `nproc` ranks on each of several hosts, and return the results of all ranks, by rank.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: A host cannot be used, or is lost.
    """
    commands = host_commands(hosts, own_environ().get(SSH_VARIABLE) or DEFAULT_SSH)
    options = Options(
        nproc=nproc,  # type: ignore[arg-type]  # None is refused
        nodes=nodes_of(commands),
        output=Output() if output is None else output,
        preload=preload,
        max_restarts=max_restarts,
        timeout=timeout,
        environ={} if environ is None else environ,
        hang_dir=hang_dir,
    )
    run = partial(run_on_this_host, function_target(fn, args), options, caller_source(), owns_descendants=True)
    job = HostJob(options=options, run=run)
    console = options.output.console(options.nproc * len(commands), in_files=False)
    try:
        with convert_resource_errors():
            values = HostsLaunch(job, commands, console).run()
    finally:
        console.drain(SECONDS_TO_READ)
    return [loads(values[rank], on_cpu=True) for rank in sorted(values)]
