"""A launch of a script by a fork of a launch server, as `rankwise launch --keep` starts it."""

from __future__ import annotations

import importlib
import os
from typing import Final

from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.interpreter import working_directory
from rankwise._launch.launchserver.remote_run import LaunchServers
from rankwise._launch.launchserver.server_identity import ServerIdentity
from rankwise._launch.preload import is_installed
from rankwise._launch.scripts import ScriptLaunch, checked_target, command_status, inherited_modules, run_as_command
from rankwise._launch.spec import common_environ
from rankwise._launch.standard_streams import open_standard_streams
from rankwise.errors import InvalidArgumentError

_AGENT: Final = "rankwise._launch.agent"


def run_in_server(launch: ScriptLaunch, name: str) -> int:
    """Run a launch in a fork of the launch server of its modules, and return its exit status.

    Args:
        launch: The launch.
        name: The name of the command, which its messages begin with.
    """
    status = 0
    console = launch.output.console(launch.nproc)

    def run() -> None:
        nonlocal status
        open_standard_streams()
        environ = common_environ(launch.nproc, one_host=launch.nodes is None)
        checked_target(launch)
        modules = inherited_modules(launch, environ)
        if modules is None and launch.kind != "program":
            raise InvalidArgumentError("--keep and --no-preload exclude each other: what is kept are the imports")
        here = working_directory()
        kept = [module for module in modules or () if is_installed(module, here)]
        if own := [module for module in modules or () if module not in kept]:
            console.print_message(f"{name}: imported by each rank, since it is no installed package: {', '.join(own)}")
        identity = ServerIdentity(environ=environ, modules=kept, prepare=_name(import_agent))
        status = LaunchServers(os.environ).run(identity, _name(run_forked), (launch, name))

    return command_status(run, name=name, console=console) or status


def import_agent() -> None:
    """Import what a launch needs. The launch server calls it once."""
    importlib.import_module(_AGENT)


def run_forked(server: ForkServer, launch: ScriptLaunch, name: str) -> int:
    """Run a launch in this process, a fork of the launch server, and return its exit status."""
    return run_as_command(launch, name, server)


def _name(function: object) -> str:
    return f"{__name__}:{function.__name__}"  # type: ignore[attr-defined]
