"""`rankwise server`: the launch servers of this user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
import psutil

from rankwise.cli.exit_status import errors_exit
from rankwise.cli.printing import echo

if TYPE_CHECKING:
    from rankwise._launch.launchserver.remote_run import LaunchServers
    from rankwise._launch.launchserver.run_request import ServerState


@click.group(short_help="List or stop the processes that --keep has left.")
def server() -> None:
    """List or stop the launch servers, which `rankwise launch --keep` leaves for the next launch."""


@server.command(name="list", short_help="List the launch servers.")
@errors_exit()
def list_() -> None:
    """List the launch servers of this user."""
    states = _servers().states()
    for state in states:
        echo(_description(state))
    if not states:
        echo("no launch server is running")


@server.command(short_help="Stop the launch servers.")
@errors_exit()
def stop() -> None:
    """Stop the launch servers of this user. One that runs a launch ends after it."""
    states = _servers().stop()
    for state in states:
        when = f"ends after {_launches(state.running)}" if state.running else "stopped"
        echo(f"process {state.pid}: {when}")
    if not states:
        echo("no launch server is running")


def _servers() -> LaunchServers:
    from rankwise._launch.launchserver.remote_run import LaunchServers  # noqa: PLC0415 - `rankwise env` does not wait

    return LaunchServers(os.environ)


def _description(state: ServerState) -> str:
    modules = ", ".join(["torch", *state.modules])
    use = f"runs {_launches(state.running)}" if state.running else f"idle for {_duration(state.idle)}"
    return (
        f"process {state.pid}: {use}, started {_duration(state.age)} ago, {_memory(state.pid)} "
        f"({modules}; {state.executable})"
    )


def _launches(number: int) -> str:
    return "1 launch" if number == 1 else f"{number} launches"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _memory(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).memory_info().rss / 1e6:.0f} MB"
    except psutil.Error:
        return "memory unknown"
