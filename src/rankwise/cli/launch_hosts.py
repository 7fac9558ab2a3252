"""The hosts of `rankwise launch --ssh`, and the options that mean something else there, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise.cli.launch_defaults import is_given
from rankwise.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rankwise._launch.hosts.launching_hosts import SshHosts

SSH_VARIABLE: Final = "RANKWISE_SSH"
DEFAULT_SSH: Final = "ssh"

# What each option would have to mean with --ssh.
_EXCLUDED: Final = {
    "node_rank": "the order of the hosts is that of --ssh",
    "rdzv_backend": "this launcher tells the hosts where they meet",
    "rdzv_endpoint": "this launcher tells the hosts where they meet; --master-addr names an address of the first one",
    "rdzv_conf": "this launcher tells the hosts where they meet",
    "local_addr": "--master-addr names an address of the first host",
    "master_port": "the first host takes a free port",
    "standalone": "it means this host alone",
    "keep": "what is kept is on one host",
    "debug": "ranks of other hosts have no terminal",
    "debugpy": "a rank listens on the loopback interface of its host",
}


def ssh_hosts(ctx: click.Context, flags: Mapping[str, Any]) -> SshHosts | None:
    """Return the hosts of --ssh; None without it.

    Raises:
        InvalidArgumentError: They are no names of hosts, or another option excludes them.
    """
    if flags["ssh"] is None:
        return None
    from rankwise._launch.hosts.launching_hosts import SshHosts  # noqa: PLC0415 - other launches do not wait for this

    for name, why in _EXCLUDED.items():
        if is_given(ctx, name):
            raise InvalidArgumentError(f"--{name.replace('_', '-')} and --ssh exclude each other: {why}")
    least, most = flags["nnodes"] if is_given(ctx, "nnodes") else (0, 0)
    return SshHosts(
        names=[name.strip() for name in flags["ssh"].split(",")],
        ssh=flags["ssh_command"],
        least=least,
        most=most,
        address=flags["master_addr"],
    )
