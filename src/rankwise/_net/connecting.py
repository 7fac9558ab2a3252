"""Connecting to a host that has several addresses and ports: all are tried at the same time.

So an address that nobody answers, as of an interface that only that host can reach, does not delay the others.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

from rankwise._net.addresses import is_loopback
from rankwise._net.polling import WRITABLE, poll

_IN_PROGRESS: Final = frozenset({0, errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK})


@dataclass(frozen=True, slots=True)
class Target:
    """An address and port, and how to connect to it."""

    family: int
    address: tuple[Any, ...]

    @property
    def port(self) -> int:
        port: int = self.address[1]
        return port


def resolve(hosts: Sequence[str], ports: Sequence[int]) -> list[Target]:
    """Return the addresses of a host that has several names, at each port; the addresses of the first port first.

    Raises:
        OSError: No name can be resolved.
        UnicodeError: One is not a valid name, and no other can be resolved.
    """
    found: dict[tuple[int, str], tuple[Any, ...]] = {}
    problem: Exception | None = None
    for host in hosts:
        try:
            for family, _, _, _, address in socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM):
                found.setdefault((family, str(address[0])), address)
        except (OSError, UnicodeError) as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return [
        Target(family, (address[0], port, *address[2:])) for port in ports for (family, _), address in found.items()
    ]


def connections(targets: Sequence[Target], seconds: float, failures: list[str]) -> Generator[socket.socket, None, None]:
    """Connect to all targets, and yield the connections in the order in which they are established.

    A connection that was yielded is the caller's to close. The others are closed when the iteration ends.

    Args:
        targets: Where to connect.
        seconds: How long to wait for them.
        failures: Receives the reasons of those that failed.
    """
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        pending: dict[int, socket.socket] = {}
        for target in targets:
            try:
                connection = socket.socket(target.family, socket.SOCK_STREAM)
            except OSError as error:  # this host has no addresses of that kind, or no descriptors are left
                failures.append(error.strerror or str(error))
                continue
            stack.callback(connection.close)
            connection.setblocking(False)
            code = connection.connect_ex(target.address)
            if code in _IN_PROGRESS:
                pending[connection.fileno()] = connection
            else:
                failures.append(os.strerror(code))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = {number for number, _ in poll(dict.fromkeys(pending, WRITABLE), left)}
            for number in [number for number in pending if number in ready]:
                connection = pending.pop(number)
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code or _is_own_end(connection):
                    failures.append(os.strerror(code or errno.ECONNREFUSED))
                else:
                    yield _released(connection)
        failures.extend(os.strerror(errno.ETIMEDOUT) for _ in pending)


def _is_own_end(connection: socket.socket) -> bool:
    """Return whether a connection has no other end, and reset it then.

    Where nobody listens yet on a port of the range from which connections get theirs, a connection may get that port,
    and is connected to itself. Closed as usual, it would keep the port from who wants to listen there for a minute.
    """
    try:
        if connection.getsockname() != connection.getpeername():
            return False
    except OSError:  # the other side has closed it
        return False
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return True


def connect_to_any(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to a host at the address that answers first.

    Raises:
        OSError: None has answered; a ConnectionRefusedError if all have refused.
        UnicodeError: The host is not a valid name.
    """
    failures: list[str] = []
    with closing(connections(resolve([host], [port]), seconds, failures)) as established:
        for connection in established:
            connection.setblocking(True)
            return connection
    if set(failures) == {os.strerror(errno.ECONNREFUSED)}:
        raise ConnectionRefusedError(errno.ECONNREFUSED, failures[0])
    raise OSError(errno.EHOSTUNREACH, ", ".join(dict.fromkeys(failures)))


def resolved_text(host: str) -> str:
    """Return the addresses that the name of a host has on this one, in parentheses, for messages; "" for an address."""
    try:
        addresses = [str(target.address[0]) for target in resolve([host], [0])]
    except (OSError, UnicodeError):
        return ""
    if host in {"localhost", *addresses}:
        return ""
    text = f"{host} is {' and '.join(addresses)} on {socket.gethostname()}"
    if all(map(is_loopback, addresses)):
        text += ", which no other host can reach: correct /etc/hosts there, or give its address in place of its name"
    return f" ({text})"


def _released(connection: socket.socket) -> socket.socket:
    """Return the connection as an object of its own, which stays open when the given one is closed."""
    return socket.socket(connection.family, connection.type, connection.proto, connection.detach())
