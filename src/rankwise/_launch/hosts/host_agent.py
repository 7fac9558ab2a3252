"""The agent of a host: it launches the ranks there, as a launcher on that host would, and reports to the launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rankwise._dependencies import require_torch
from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.ipc import TargetKind, receive_message
from rankwise._launch.forwarded_signals import forwarded_signals
from rankwise._launch.hosts.host_messages import HostEnded, HostJob
from rankwise._launch.hosts.relay_console import Relay, RelayConsole
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.preload import preloaded_modules, script_source
from rankwise._launch.rank_stacks import HANG_DIR
from rankwise._launch.reaper import set_parent_death_signal
from rankwise._launch.resource_limits import convert_resource_errors
from rankwise._launch.scripts import Terminated, terminated_by_signals
from rankwise._launch.spec import LaunchSpec, common_environ
from rankwise._launch.supervisor import Supervisor
from rankwise._launch.targets import check_target
from rankwise._net.job_secret import find_secret
from rankwise.errors import LaunchError, RankFailedError, RankwiseError

# How long the launcher may read nothing before the rest of the output is discarded.
_SECONDS_TO_READ: Final = 25.0


def main(search_path: Sequence[str]) -> None:  # noqa: ARG001 - of processes that import a script
    """Launch. The last argument is the descriptor of the connection to the guard."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher in the background may have ignored it
    connection = socket.socket(fileno=int(sys.argv[-1]))
    connection.set_inheritable(False)
    relay = Relay(os.dup(1))
    os.dup2(2, 1)  # what others print to standard output must not be taken for messages
    try:
        job: HostJob = receive_message(connection)
    except EOFError:  # the guard has ended
        os._exit(1)
    console = RelayConsole(relay, job.output, job.spec.nproc)
    ended = _launch(job, connection, relay, console)
    relay.send(replace(ended, lost=tuple(console.drain(_SECONDS_TO_READ))))
    relay.writer.drain(_SECONDS_TO_READ)
    os._exit(0)  # a normal exit unloads torch, which takes long


def _launch(job: HostJob, connection: socket.socket, relay: Relay, console: RelayConsole) -> HostEnded:
    """Run the ranks, and return how they have ended."""
    ranks: dict[int, LaunchedRank] = {}
    try:
        with terminated_by_signals(job.signals):
            _run(job, connection, relay, console, ranks)
    except RankwiseError as error:
        return _failed(error, ranks)
    except (KeyboardInterrupt, Terminated) as stop:
        before = stop.__cause__
        by = signal.Signals(stop.status - 128 if isinstance(stop, Terminated) else signal.SIGINT)
        return HostEnded(error=before if isinstance(before, RankwiseError) else None, stopped=by.name)
    is_function = job.spec.kind is TargetKind.FUNCTION
    values = {number: rank.result.value for number, rank in ranks.items() if is_function and rank.result is not None}
    return HostEnded(values=values)


def _run(
    job: HostJob, connection: socket.socket, relay: Relay, console: RelayConsole, ranks: dict[int, LaunchedRank]
) -> None:
    """Run the ranks.

    Args:
        job: The job, as the launcher has sent it.
        connection, relay: The connections from the launcher, and to it.
        console: Shows the output.
        ranks: Gets the ranks.
    """
    require_torch("starting ranks")
    environ = common_environ(job.spec.nproc, one_host=False) | dict(job.spec.environ)
    spec = replace(job.spec, environ=environ)
    if spec.kind is not TargetKind.FUNCTION and spec.source is None:
        check_target(spec.kind, spec.argv[0])
    secret = find_secret(spec.environ)
    if secret is None:
        raise LaunchError("the launcher has sent no secret for the hosts of the job")

    def start_server() -> ForkServer:
        return ForkServer(spec.environ, preload=_inherited(job, spec), owns_descendants=True)

    hang_dir = environ.get(HANG_DIR, "")
    with convert_resource_errors(), Supervisor(start_server, console=console, hang_dir=hang_dir) as supervisor:
        from rankwise._launch.agent import run_ranks  # noqa: PLC0415 - imports torch while the fork server does
        from rankwise._launch.hosts.launcher_rendezvous import LauncherRendezvous  # noqa: PLC0415 - likewise

        run_id = "none" if spec.nodes is None else spec.nodes.run_id
        try:
            with forwarded_signals(supervisor, job.signals):
                run_ranks(spec, supervisor, LauncherRendezvous(connection, relay, run_id, secret))
        finally:
            ranks.update(supervisor.ranks)


def _inherited(job: HostJob, spec: LaunchSpec) -> tuple[str, ...] | None:
    if spec.kind is TargetKind.PROGRAM:
        return None
    main = script_source(spec.kind, spec.argv[0]) if job.main is None else job.main
    return preloaded_modules(job.preload, spec.environ, main)


def _failed(error: RankwiseError, ranks: dict[int, LaunchedRank]) -> HostEnded:
    first = ranks.get(error.failures[0].rank) if isinstance(error, RankFailedError) else None
    is_origin = first is not None and not first.was_stopped and not (first.result and first.result.consequence)
    cause = b"" if first is None or first.result is None else first.result.error
    return HostEnded(error=error, cause=cause, is_origin=is_origin)
