"""The hosts of `rankwise launch --ssh` and `--srun`, and the options that mean something else there, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click
from click.core import ParameterSource

from rankwise._launch.hosts.hosts_launch import nodes_of
from rankwise._launch.hosts.srun_command import srun_commands
from rankwise._launch.hosts.ssh_command import HostCommand, host_commands
from rankwise._launch.spec import own_environ
from rankwise.cli.launch_defaults import is_given
from rankwise.errors import InvalidArgumentError
from rankwise.launching import Nodes

# Why an option has no meaning with --ssh or --srun.
_EXCLUDED: Final = {
    "node_rank": "the hosts have an order already",
    "rdzv_backend": "this launcher tells the hosts where they meet",
    "rdzv_endpoint": "this launcher tells the hosts where they meet; --master-addr names an address of the first one",
    "rdzv_conf": "this launcher tells the hosts where they meet",
    "local_addr": "--master-addr names an address of the first host",
    "master_port": "the first host takes a free port",
    "standalone": "it means this host alone",
    "debug": "ranks of other hosts have no terminal; debug them on one host, or see where they are with Ctrl-\\",
    "debugpy": "a rank listens on the loopback interface of its host; debug on one host, or call debugpy.listen()",
}


def hosts_of_options(ctx: click.Context, flags: Mapping[str, Any]) -> tuple[list[HostCommand], Nodes]:
    """Return how the hosts of --ssh or --srun are reached, and the hosts.

    Raises:
        InvalidArgumentError: They are no names of hosts, there is no allocation, or another option excludes them.
        LauncherEnvironmentError: The list of nodes of the allocation is malformed.
    """
    own = "--srun" if flags["srun"] else "--ssh"
    if flags["srun"] and flags["ssh"] is not None:
        raise InvalidArgumentError("--ssh and --srun exclude each other: a host is reached in one way")
    for name, why in _EXCLUDED.items():
        if is_given(ctx, name):
            raise InvalidArgumentError(f"--{name.replace('_', '-')} and {own} exclude each other: {why}")
    has_number = ctx.get_parameter_source("nnodes") is not ParameterSource.DEFAULT
    least, most = flags["nnodes"] if has_number else (0, 0)
    names = [name.strip() for name in (flags["ssh"] or "").split(",")]
    commands = srun_commands(own_environ()) if flags["srun"] else host_commands(names, flags["ssh_command"])
    return commands, nodes_of(commands, least=least, most=most, address=flags["master_addr"])
