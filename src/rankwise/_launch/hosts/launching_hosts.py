"""A script, a module, a program or a function in ranks of several hosts, started from one terminal."""

from __future__ import annotations

import pickle
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rankwise._launch.console import SECONDS_TO_READ, Console
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise._launch.forwarded_signals import forwarded_signals
from rankwise._launch.function_call import FunctionCall
from rankwise._launch.hosts.host_messages import HostJob
from rankwise._launch.hosts.hosts_launch import HostsLaunch
from rankwise._launch.hosts.ssh_command import DEFAULT_SSH, SSH_VARIABLE, HostCommand, host_commands
from rankwise._launch.output import Output
from rankwise._launch.preload import Preload, caller_source, check_preload
from rankwise._launch.rank_stacks import HANG_DIR
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.scripts import KINDS, STOP_SIGNALS, ScriptLaunch, command_status, terminated_by_signals
from rankwise._launch.spec import LaunchSpec, check_nproc, own_environ
from rankwise._launch.standard_streams import open_standard_streams
from rankwise._launch.targets import read_piped
from rankwise._pickling import loads
from rankwise._rendezvous.nodes import BY_LAUNCHER, Nodes
from rankwise.errors import InvalidArgumentError, shown

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHosts:
    """The hosts of a launch from one terminal.

    Attributes:
        commands: How their guards are started, in the order of their ranks.
        least, most: How many of them have ranks; 0 for all. The others are spares.
        address: The address of the first host for the others; "" for the one that ssh has reached it at.

    Raises:
        InvalidArgumentError: They are too few.
    """

    commands: Sequence[HostCommand]
    least: int = 0
    most: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        names = [command.name for command in self.commands]
        if self.most > len(names):
            raise InvalidArgumentError(
                f"nnodes={self.most} is above the number of hosts, {len(names)}: {', '.join(names)}"
            )

    def nodes(self) -> Nodes:
        """Return the hosts as each of them sees them, with a run id of their own."""
        most = self.most or len(self.commands)
        return Nodes(
            num_nodes=most,
            min_nodes=self.least or most,
            address="of the first host, found by the launcher",
            backend=BY_LAUNCHER,
            run_id=uuid.uuid4().hex,
        )

    def launch(self, job: HostJob, nodes: Nodes, console: Console) -> HostsLaunch:
        """Return a launch of a job on them."""
        return HostsLaunch(
            job,
            self.commands,
            console=console,
            least=nodes.min_nodes,
            most=nodes.num_nodes,
            address=self.address,
        )


def run_on_hosts_as_command(launch: ScriptLaunch, hosts: LaunchHosts, name: str) -> int:
    """Run a target in ranks of several hosts, as `ScriptLaunch.run_as_command` does on one; return the exit status.

    Args:
        launch: The launch of each host.
        hosts: The hosts.
        name: The name of the command, which its messages begin with.
    """
    nodes = hosts.nodes()
    console = launch.output.console(launch.nproc * nodes.num_nodes, in_files=False)

    def run() -> None:
        open_standard_streams()
        started = hosts.launch(_script_job(launch, nodes), nodes, console)
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
) -> list[R]:
    """Run a function in `nproc` ranks on each of several hosts, and return the results of all ranks, by rank.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        RankFailedError: A rank failed, and the others were stopped.
        LaunchError: A host cannot be used, or is lost.
    """
    number = check_nproc(nproc)  # type: ignore[arg-type]  # None is refused
    placed = LaunchHosts(commands=host_commands(hosts, own_environ().get(SSH_VARIABLE) or DEFAULT_SSH))
    if not callable(fn):
        raise InvalidArgumentError(f"launch takes a function and its arguments, got {shown(fn)}")
    check_preload(preload)
    nodes, where = placed.nodes(), Output() if output is None else output
    spec = LaunchSpec(
        nproc=number,
        kind=TargetKind.FUNCTION,
        argv=tuple(map(str, getattr(sys, "argv", ()))),
        call=pickle.dumps(FunctionCall.of(fn, tuple(args))),
        nodes=nodes,
    )
    job = HostJob(spec=spec, preload=preload, main=caller_source(), output=where, signals=STOP_SIGNALS)
    console = where.console(number * nodes.num_nodes, in_files=False)
    try:
        with convert_resource_errors():
            values = placed.launch(job, nodes, console).run()
    finally:
        console.drain(SECONDS_TO_READ)
    return [loads(values[rank]) for rank in sorted(values)]


def _script_job(launch: ScriptLaunch, nodes: Nodes) -> HostJob:
    kind = KINDS[launch.kind]
    spec = LaunchSpec(
        nproc=launch.nproc,
        kind=kind,
        argv=(launch.target, *launch.args),
        max_restarts=launch.max_restarts,
        nodes=nodes,
        append_local_rank=launch.append_local_rank,
        grace=launch.grace,
        role=launch.role,
        virtual_local_rank=launch.virtual_local_rank,
        environ={HANG_DIR: str(Path(launch.hang_dir).absolute())} if launch.hang_dir else {},
        source=read_piped(launch.target) if kind is TargetKind.SCRIPT else None,
    )
    return HostJob(
        spec=spec, preload=launch.preload, main=None, output=launch.output, signals=tuple(map(int, launch.signals))
    )
