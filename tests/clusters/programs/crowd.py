"""Open connections that prove nothing, to each port that processes of this host listen on: crowd.py NUMBER READY.

A third of them sends nothing, a third half a message, and a third garbage. All stay open until the other side closes
them. It makes the file READY when it begins, and prints how many it has opened when its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
from pathlib import Path

import psutil

MESSAGES = (b"", b'{"protocol": "rankw', os.urandom(60))


def listeners() -> set[tuple[str, int]]:
    """Return the addresses and ports that processes of this host listen on."""
    found = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {("127.0.0.1" if each.ip in {"::", "0.0.0.0"} else each.ip, each.port) for each in found if each}  # noqa: S104


def crowd(address: tuple[str, int], number: int, kept: list[socket.socket]) -> None:
    """Connect to a port so many times."""
    for count in range(number):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=1)
            kept.append(connection)
            connection.send(MESSAGES[count % len(MESSAGES)])


def main() -> None:
    number, ready = int(sys.argv[1]), Path(sys.argv[2])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kept: list[socket.socket] = []
    visited: set[tuple[str, int]] = set()
    ready.touch()
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        for address in listeners() - visited:
            visited.add(address)
            crowd(address, number, kept)
    sys.stdout.write(f"{len(kept)} connections to {len(visited)} ports on {socket.gethostname()}\n")


main()
