"""How the members of a group connect to each other, each to each.

Every member says over the store where it can be reached, and connects to those before it. On one host that is a socket
whose other end must be this user's, whatever others write into the store; between hosts, whoever connects must know a
secret from the store. See SECURITY.md.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.mesh import Mesh
from rankwise._net.acceptor import Acceptor, Client, listen
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import host_id, network_id
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import CollectiveError, CollectiveTimeoutError, JoinError, printable, shortened

_SECRET_BYTES: Final = 16
# The secret, and the place of whoever connects.
_GREETING: Final = struct.Struct(f"<{_SECRET_BYTES}sI")
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_CHECK_SECONDS: Final = 0.1
# What a host may call itself.
_LONGEST_NAME: Final = 64
_UNKNOWN: Final[Mapping[int, str]] = {}
# The socket of a member on its own host. No file: the name goes with the socket.
_LOCAL_NAME: Final = "rankwise-{}"
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

    @classmethod
    def read(cls, text: str, rank: int) -> _Address:
        """Return what a member has said.

        Raises:
            CollectiveError: No member says that.
        """
        try:
            address = decode_line(cls, text)
            if len(bytes.fromhex(address.secret)) != _SECRET_BYTES or not re.fullmatch(r"[-a-z0-9]+", address.local):
                raise ValueError(f"{address.local!r} is no address")  # noqa: TRY301 - as what cannot be read
        except ValueError as error:
            raise CollectiveError(
                f"what rank {rank} said in the store of where it can be reached cannot be read: {error}; does another "
                "program use the store?"
            ) from error
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a member needs to find the others.

    Attributes:
        store: What the members share.
        name: The group's, the same on all members and on no other group.
        ranks: The members' global ranks, by place.
        place: This member's.
        one_host: All members are known to be on this host: then no word of others makes them leave it.
        reach: Returns the name or address that other hosts reach this one by.
        timeout: Seconds to wait for the others.
        check: Called while waiting, with what returns the ranks that are waited for; raises if that is in vain.
            A member that has done its part may be gone by now.
    """

    store: Store
    name: str
    ranks: Sequence[int]
    place: int
    one_host: bool
    reach: Callable[[], str]
    timeout: float
    check: Callable[[Callable[[], Sequence[int]]], None]

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
            hosts = {} if self.one_host else self._hosts(host, deadline)
            near = not hosts
            listeners.append(_listen_locally())
            if not near:
                listeners.append(listen(0, one_host=False))
            secret = secrets.token_bytes(_SECRET_BYTES)
            own = _Address(
                host=host,
                local=_local_name(listeners[0]),
                remote="" if near else self.reach(),
                port=0 if near else listeners[-1].getsockname()[1],
                secret=secret.hex(),
            )
            self.store.set(f"{self.name}/address/{self.place}", encode_line(own))
            for other, text in enumerate(self._read("address", self.place, deadline, hosts)):
                address = _Address.read(text, self.ranks[other])
                is_local = near or address.host == host
                connections[other] = self._reach(other, address, near=is_local, deadline=deadline)
            self._accept(listeners, secret, connections, hosts, deadline)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
        return Mesh(self.name, self.ranks, connections, hosts)

    def _hosts(self, host: str, deadline: float) -> dict[int, str]:
        """Return the names of the members' hosts, by rank; none if all members say that they are on this one."""
        self.store.set(f"{self.name}/host/{self.place}", f"{host} {socket.gethostname()}")
        told = [other.partition(" ") for other in self._read("host", len(self.ranks), deadline)]
        if all(other == host for other, _, _ in told):
            return {}
        return {
            rank: printable(shortened(name, _LONGEST_NAME)) for rank, (_, _, name) in zip(self.ranks, told, strict=True)
        }

    def _read(self, what: str, count: int, deadline: float, hosts: Mapping[int, str] = _UNKNOWN) -> list[str]:
        """Return what the first so many members have said of themselves, once they have."""
        keys = [f"{self.name}/{what}/{place}" for place in range(count)]
        pause, longest = _PAUSE_SECONDS

        def awaited() -> list[int]:
            return [self.ranks[place] for place, key in enumerate(keys) if not self.store.check([key])]

        while keys and not self.store.check(keys):
            self.check(awaited)
            if time.monotonic() > deadline:
                raise self._late(awaited(), hosts)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return [value.decode(errors="replace") for value in self.store.multi_get(keys)] if keys else []

    def _reach(self, place: int, address: _Address, *, near: bool, deadline: float) -> socket.socket:
        """Connect to a member, and say who this is."""
        where = address.local if near else f"{address.remote}:{address.port}"
        try:
            if not near:
                timeout = max(0.1, deadline - time.monotonic())
                connection = socket.create_connection((address.remote, address.port), timeout=timeout)
            else:
                connection = self._connect_locally(place, address.local, deadline)
        except (OSError, OverflowError, UnicodeError) as error:
            raise self._unreachable(place, where, error) from error
        try:
            if not _is_ours(connection):
                raise ConnectionRefusedError("it belongs to another user")
            connection.sendall(_GREETING.pack(bytes.fromhex(address.secret), self.place))
        except OSError as error:
            connection.close()
            raise self._unreachable(place, where, error) from error
        return connection

    def _connect_locally(self, place: int, name: str, deadline: float) -> socket.socket:
        if sys.platform != "linux":
            return socket.create_connection((LOOPBACK, int(name)), timeout=max(0.1, deadline - time.monotonic()))
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_CHECK_SECONDS)
            while True:
                try:
                    connection.connect(f"\0{name}")
                except BlockingIOError:  # others wait there to be let in, more than there is room for
                    self.check(lambda: [self.ranks[place]])
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_CHECK_SECONDS)
                else:
                    return connection
        except BaseException:
            connection.close()
            raise

    def _unreachable(self, place: int, where: str, error: Exception) -> CollectiveError:
        hint = "; all ranks are said to be on one host, by their launcher or an address on loopback: are they?"
        return CollectiveError(
            f"rank {self.ranks[place]} cannot be reached at {where}: {error}{hint if self.one_host else ''}"
        )

    def _accept(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        connections: dict[int, socket.socket],
        hosts: Mapping[int, str],
        deadline: float,
    ) -> None:
        """Let the members after this one connect."""
        expected = set(range(self.place + 1, len(self.ranks)))
        idle = 0
        with Acceptor(listeners, admits=_is_ours) as acceptor:
            while expected:
                if time.monotonic() > deadline:
                    late = [self.ranks[place] for place in sorted(expected)]
                    raise self._late(late, hosts, acceptor.rejected_text())
                try:
                    clients = acceptor.wait(_CHECK_SECONDS)
                except JoinError as error:
                    raise CollectiveError(f"rank {self.ranks[self.place]}: {error}") from error
                idle = 0 if clients else idle + 1
                if idle > 1:  # at one look, somebody may have come and gone who is let in now and heard at the next
                    self.check(lambda: [self.ranks[place] for place in expected])
                for client in clients:
                    # No more than the greeting: what follows it is for the mesh.
                    is_there = client.read(_GREETING.size - len(client.received))
                    place = _greeted(client, secret)
                    if place in expected:
                        expected.remove(place)
                        connections[place] = acceptor.release(client)
                    elif not is_there or place is not None:
                        acceptor.reject(client)

    def _late(self, ranks: Sequence[int], hosts: Mapping[int, str], strangers: str = "") -> CollectiveTimeoutError:
        own = self.ranks[self.place]
        return CollectiveTimeoutError(
            f"{ranks_on_hosts_text(ranks, hosts)} did not connect to rank {own} in {self.timeout:g} s.{strangers}"
        )


def _listen_locally() -> socket.socket:
    if sys.platform != "linux":
        return listen(0, one_host=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{_LOCAL_NAME.format(secrets.token_hex(_SECRET_BYTES))}")
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


def _greeted(client: Client, secret: bytes) -> int | None:
    """Return the place of whoever connected, -1 for a stranger; None if it has not said all of it."""
    if len(client.received) < _GREETING.size:
        return None
    shown, place = _GREETING.unpack(client.received)
    return int(place) if hmac.compare_digest(shown, secret) else -1
