"""Addresses that only this host can connect to, and those that others can."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host name refers to the loopback interface, which only this host can reach."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def address_for_others(connections: Iterable[socket.socket]) -> str:
    """Return the address of this host that one of several connections has to another host; "" if none has."""
    for connection in connections:
        with contextlib.suppress(OSError):  # it was closed
            address = str(connection.getsockname()[0]).removeprefix("::ffff:")
            # Within a host, both ends have the same address, which others may not be able to reach.
            if not is_loopback(address) and connection.getpeername()[0].removeprefix("::ffff:") != address:
                return address
    return ""
