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


def own_addresses() -> list[str]:
    """Return the addresses of this host's interfaces that other hosts may be able to reach, those of IPv4 first."""
    running = {name for name, interface in psutil.net_if_stats().items() if interface.isup}
    found = [each for name, every in psutil.net_if_addrs().items() if name in running for each in every]
    addresses = [
        each.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for each in found
        if each.family == family and not each.address.startswith(("127.", "fe80:")) and each.address != "::1"
    ]
    return list(dict.fromkeys(addresses))


def loopback_interface() -> str:
    """Return the name of the loopback interface; "" if there is none."""
    return next((interface for _, interface in socket.if_nameindex() if interface in {"lo", "lo0"}), "")


def interface_towards_others(own_address: str) -> str:
    """Return the interface that a program should use which would otherwise use the address of this host's name.

    Args:
        own_address: The address of this host for other hosts, or a name of it.

    Returns:
        "" if the first address of its name can be used: it is `own_address`, or that is not known and it is one of an
        interface, and not loopback's. Else the interface of `own_address`; or of the only address that this host has,
        if that is not one of them either.
    """
    own = own_addresses()
    named = [address for address in _resolved(socket.gethostname()) if address in own]
    found = [address for address in (own_address, *_resolved(own_address)) if address in own]
    if named and (not found or named[0] in found):
        return ""
    if not found and len(own) == 1:
        found = own
    names = [name for name, every in psutil.net_if_addrs().items() for each in every if each.address in found[:1]]
    return names[0] if names else ""


def _resolved(name: str) -> list[str]:
    try:
        return [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


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
