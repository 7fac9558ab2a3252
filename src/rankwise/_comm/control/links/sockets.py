"""Sockets between ranks: their addresses in the store, local ones, the user at the other end, and options."""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final

from rankwise._net.acceptor import listen
from rankwise._net.addresses import LOOPBACK
from rankwise._net.connecting import resolve
from rankwise._net.json_lines import decode_line

# The abstract socket of a member. It has no file: the name disappears with the socket.
_LOCAL_NAME: Final = "rankwise-{}"
_NAME_BYTES: Final = 16
# A host that lost its power closes no connection. So TCP sends a probe after so many seconds of silence, repeats it
# after so many, and closes the connection after so many without an answer.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
# Linux: process, user and group of the peer.
_CREDENTIALS: Final = struct.Struct("3i")
SECRET_BYTES: Final = 16
_MAX_PORT: Final = (1 << 16) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a rank listens: `local` for ranks of its own host, `remote` and `port` for those of others."""

    local: str
    remote: str
    port: int
    secret: str

    @classmethod
    def read(cls, text: bytes) -> Address:
        """Return the address that a rank wrote to the store.

        Raises:
            ValueError: The text is not an address.
        """
        address = decode_line(cls, text.decode(errors="replace"))
        if len(bytes.fromhex(address.secret)) != SECRET_BYTES or not re.fullmatch(r"[-a-z0-9]+", address.local):
            raise ValueError(f"{address.local!r} is no address")
        if not 0 <= address.port <= _MAX_PORT:
            raise ValueError(f"{address.port} is no port")
        return address

    def targets(self, *, is_local: bool) -> list[tuple[int, Any]]:
        """Return the families and addresses to connect to. Looks up the name of another host.

        Raises:
            OSError, UnicodeError: The name has no address.
        """
        if not is_local:
            return [(target.family, target.address) for target in resolve([self.remote], [self.port])]
        if sys.platform != "linux":
            return [(socket.AF_INET, (LOOPBACK, int(self.local)))]
        return [(socket.AF_UNIX, f"\0{self.local}")]


def listen_locally() -> socket.socket:
    """Return a listening socket for ranks of this host."""
    if sys.platform != "linux":
        return listen(0, one_host=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{_LOCAL_NAME.format(secrets.token_hex(_NAME_BYTES))}")
    listener.listen(socket.SOMAXCONN)
    return listener


def local_name(listener: socket.socket) -> str:
    """Return the name of a listening socket, or its port where it is on loopback."""
    name = listener.getsockname()
    return name.decode().lstrip("\0") if isinstance(name, bytes) else str(name[1])


def admit(connection: socket.socket) -> bool:
    """Set the options of a connection; False if its peer is known to be a process of another user."""
    if connection.family == getattr(socket, "AF_UNIX", None):
        sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(sent)[1] == os.getuid())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return True
