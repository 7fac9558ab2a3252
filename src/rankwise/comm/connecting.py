"""How the members of a group connect to each other, each to each.

Every member says over the store where it can be reached, and connects to those before it. On one host that is a socket
that nobody but this user can reach; between hosts, whoever connects must know a secret from the store.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from torch.distributed import Store

from rankwise.comm.mesh import Mesh
from rankwise.errors import CollectiveError, CollectiveTimeoutError
from rankwise.rendezvous import LOOPBACK
from rankwise.session.door import listen
from rankwise.session.host import host_id, network_id
from rankwise.session.roll_call import ranks_text

_SECRET_BYTES: Final = 16
# The secret, and the place of whoever connects.
_GREETING: Final = struct.Struct(f"<{_SECRET_BYTES}sI")
# How long somebody who connected may take to say who it is.
_GREETING_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_CHECK_MILLISECONDS: Final = 100
# A host that lost its power says nothing: it is asked after so many seconds of silence, again after so many, so often.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
# Linux: process, user and group of the other side.
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """Where a member can be reached: by `local` on its own host, by `remote` and `port` from others."""

    host: str
    local: str
    remote: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a member needs to find the others.

    Attributes:
        store: What the members share.
        name: The group's, the same on all members and on no other group.
        ranks: The members' global ranks, by place.
        place: This member's.
        reach: Returns the name or address that other hosts reach this one by.
        timeout: Seconds to wait for the others.
        check: Called while waiting; raises if that is in vain.
    """

    store: Store
    name: str
    ranks: Sequence[int]
    place: int
    reach: Callable[[], str]
    timeout: float
    check: Callable[[], None]

    def connect(self) -> Mesh:
        """Connect to the other members.

        Collective over the members.

        Raises:
            CollectiveError: A member could not be reached.
            CollectiveTimeoutError: Some did not come in time.
        """
        deadline = time.monotonic() + self.timeout
        connections: dict[int, socket.socket] = {}
        listeners: list[socket.socket] = []
        try:
            host = f"{host_id()}/{network_id()}"
            self.store.set(f"{self.name}/host/{self.place}", host)
            hosts = self._read("host", len(self.ranks), deadline)
            listeners.append(_listen_locally())
            if any(other != host for other in hosts):
                listeners.append(listen(0, one_host=False))
            secret = secrets.token_bytes(_SECRET_BYTES)
            own = _Address(
                host=host,
                local=_local_name(listeners[0]),
                remote=self.reach() if len(listeners) > 1 else "",
                port=listeners[-1].getsockname()[1] if len(listeners) > 1 else 0,
                secret=secret.hex(),
            )
            self.store.set(f"{self.name}/address/{self.place}", json.dumps(asdict(own)))
            for other, text in enumerate(self._read("address", self.place, deadline)):
                address = _Address(**json.loads(text))
                connections[other] = self._reach(other, address, near=address.host == host, deadline=deadline)
            self._accept(listeners, secret, connections, deadline)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        return Mesh(self.name, self.ranks, connections, near=len(listeners) == 1)

    def _read(self, what: str, count: int, deadline: float) -> list[str]:
        """Return what the first so many members have said of themselves, once they have."""
        keys = [f"{self.name}/{what}/{place}" for place in range(count)]
        pause, longest = _PAUSE_SECONDS
        while keys and not self.store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                raise self._late([place for place, key in enumerate(keys) if not self.store.check([key])])
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return [value.decode() for value in self.store.multi_get(keys)] if keys else []

    def _reach(self, place: int, address: _Address, *, near: bool, deadline: float) -> socket.socket:
        """Connect to a member, and say who this is."""
        timeout = max(0.1, deadline - time.monotonic())
        try:
            if not near:
                connection = socket.create_connection((address.remote, address.port), timeout=timeout)
            elif sys.platform != "linux":
                connection = socket.create_connection((LOOPBACK, int(address.local)), timeout=timeout)
            else:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(f"\0{address.local}")
            if not _is_ours(connection):
                raise ConnectionRefusedError("it belongs to another user")
            connection.sendall(_GREETING.pack(bytes.fromhex(address.secret), self.place))
        except OSError as error:
            where = address.local if near else f"{address.remote}:{address.port}"
            raise CollectiveError(f"rank {self.ranks[place]} cannot be reached at {where}: {error}") from error
        return connection

    def _accept(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        connections: dict[int, socket.socket],
        deadline: float,
    ) -> None:
        """Let the members after this one connect."""
        expected = set(range(self.place + 1, len(self.ranks)))
        poller = select.poll()
        for listener in listeners:
            poller.register(listener, select.POLLIN)
        open_doors = {listener.fileno(): listener for listener in listeners}
        while expected:
            if time.monotonic() > deadline:
                raise self._late(sorted(expected))
            ready = poller.poll(_CHECK_MILLISECONDS)
            if not ready:
                self.check()
            for descriptor, _ in ready:
                guest, _ = open_doors[descriptor].accept()
                place = _greeted(guest, secret) if _is_ours(guest) else None
                if place in expected:
                    expected.remove(place)
                    connections[place] = guest
                else:
                    guest.close()

    def _late(self, places: Sequence[int]) -> CollectiveTimeoutError:
        who = ranks_text([self.ranks[place] for place in places])
        return CollectiveTimeoutError(f"{who} did not connect to rank {self.ranks[self.place]} in {self.timeout:g} s")


def _listen_locally() -> socket.socket:
    if sys.platform != "linux":
        return listen(0, one_host=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0rankwise-{secrets.token_hex(_SECRET_BYTES)}")  # no file: the name goes with the socket
    listener.listen(socket.SOMAXCONN)
    return listener


def _local_name(listener: socket.socket) -> str:
    name = listener.getsockname()
    return name.decode().lstrip("\0") if isinstance(name, bytes) else str(name[1])


def _is_ours(connection: socket.socket) -> bool:
    """Make a connection ready; False if another user's process is at its other end, as far as this host knows."""
    if connection.family == getattr(socket, "AF_UNIX", None):
        sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(sent)[1] == os.getuid())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return True


def _greeted(guest: socket.socket, secret: bytes) -> int | None:
    """Return the place of whoever connected, or None for a stranger."""
    guest.settimeout(_GREETING_SECONDS)
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < _GREETING.size and (piece := guest.recv(_GREETING.size - len(received))):
            received += piece
    if len(received) < _GREETING.size:
        return None
    shown, place = _GREETING.unpack(received)
    return place if hmac.compare_digest(shown, secret) else None
