"""What this host says of itself and of the processes on it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil


def host_id() -> str:
    """Return what tells this host from others of its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: the name must do
        return ""


def launching_process(variable: str) -> str:
    """Name the process that started the ranks of this host: the nearest ancestor that is no rank itself.

    Ranks may be wrapped in shells, which have their variables too; mpirun's daemon has not.
    """
    process = psutil.Process()
    for parent in process.parents():
        try:
            if variable not in parent.environ():
                return f"{parent.pid}@{socket.gethostname()}"
        except psutil.Error:  # another user's: then it is no rank of ours
            return f"{parent.pid}@{socket.gethostname()}"
    return f"{os.getppid()}@{socket.gethostname()}"


def network_id() -> str:
    """Return what tells this host's networks apart: containers on one host have their own."""
    try:
        return str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:  # not Linux: there is but one
        return ""


def address_towards(host: str, port: int) -> str:
    """Return the address that others on the way to a host reach this one by. Sends nothing.

    Where the host's name is this very host and resolves to loopback, others know better what it means.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return host if own == "::1" or own.startswith("127.") else own
