"""Ids and addresses of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil


def host_id() -> str:
    """Return a unique id of this host: several hosts may have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: the name has to suffice
        return ""


def launching_process(variable: str) -> str:
    """Return a unique id of the process that started the ranks of this host: the nearest ancestor that is not a rank.

    Ranks may be wrapped in shells, which have the variables of a rank too; mpirun's daemon does not have them.
    """
    process = psutil.Process()
    for parent in process.parents():
        try:
            if variable not in parent.environ():
                return f"{parent.pid}@{socket.gethostname()}"
        except psutil.Error:  # another user's process, which is not a rank of this world
            return f"{parent.pid}@{socket.gethostname()}"
    return f"{os.getppid()}@{socket.gethostname()}"


def network_id() -> str:
    """Return a unique id of this process's network namespace: each container on a host has its own."""
    try:
        return str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:  # not Linux: there is only one
        return ""


def address_towards(host: str, port: int) -> str:
    """Return the address of this host on the route to another host. Sends nothing.

    Where `host` is this host itself and resolves to loopback, the name is returned: other hosts resolve it to a
    routable address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return host if own == "::1" or own.startswith("127.") else own
