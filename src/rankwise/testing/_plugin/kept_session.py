"""`pytest --ranks-keep`: the session runs in a fork of a launch server, with torch and plugins of pytest imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import pytest

from rankwise._launch.forkserver.client import ForkServer
from rankwise._launch.forkserver.interpreter_exit import exit_interpreter
from rankwise._launch.launchserver.remote_run import LaunchServers
from rankwise._launch.launchserver.server_identity import ServerIdentity
from rankwise._launch.spec import common_environ

# Called by the process that ranks are forked from, before it forks them.
PREPARE: Final = "rankwise.testing._plugin.rank_session:load_plugins"
# Set by pytest-xdist in its workers, which cannot leave their processes.
_XDIST_WORKER: Final = "PYTEST_XDIST_WORKER"


class KeptForkServer:
    """A plugin of the session that has the fork server for its ranks."""

    def __init__(self, server: ForkServer) -> None:
        self.server: ForkServer | None = server


def can_leave(config: pytest.Config) -> bool:
    """Return whether a session may run in another process: not for a caller with objects of this one."""
    return not config.invocation_params.plugins and _XDIST_WORKER not in os.environ


def take_server(config: pytest.Config) -> ForkServer | None:
    """Return the fork server that this session has from a launch server, once; None if there is none."""
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, KeptForkServer):
            server, plugin.server = plugin.server, None
            return server
    return None


def run_in_server(args: Sequence[str]) -> int:
    """Run a session of pytest in a fork of a launch server, and return its exit status.

    Raises:
        LaunchError: No server could be started, or it was killed.
    """
    environ = common_environ(os.cpu_count() or 1, one_host=True)  # as the fork server of a session has it
    identity = ServerIdentity(environ=environ, modules=(), prepare=PREPARE)
    return LaunchServers(os.environ).run(identity, f"{__name__}:{run_forked.__name__}", (tuple(args),))


def run_forked(server: ForkServer, args: Sequence[str]) -> NoReturn:
    """Run a session of pytest in this process, a fork of the launch server, and end it."""
    imported_before = frozenset(sys.modules)
    server.owns_descendants = False  # plugins may start processes
    exit_interpreter(int(pytest.main(list(args), plugins=[KeptForkServer(server)])), imported_before)
