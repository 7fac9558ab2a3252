"""The connections of a new group: every member connects to every other member.

Every member writes its address to the store, connects to the members before it, and accepts the members after it. On
one host the connections are sockets whose other end must belong to the same user, whatever other users write to the
store. Between hosts the connecting side must send a secret from the store. See SECURITY.md.
"""

from __future__ import annotations

import hmac
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
from rankwise._comm.control.sockets import admit, listen_locally, local_name
from rankwise._net.acceptor import Acceptor, Client, listen
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import host_id, network_id
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import CollectiveError, CollectiveTimeoutError, JoinError, printable, shortened

_SECRET_BYTES: Final = 16
# The secret, and the group rank of the connecting member.
_GREETING: Final = struct.Struct(f"<{_SECRET_BYTES}sI")
# The shortest and the longest pause between two reads of the store.
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_CHECK_SECONDS: Final = 0.1
_MAX_HOST_NAME: Final = 64
_NO_HOSTS: Final[Mapping[int, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """The address of a member: `local` for ranks of its own host, `remote` and `port` for other hosts."""

    host: str
    local: str
    remote: str
    port: int
    secret: str

    @classmethod
    def read(cls, text: str, rank: int) -> _Address:
        """Return the address that a rank wrote to the store.

        Raises:
            CollectiveError: The text is not an address.
        """
        try:
            address = decode_line(cls, text)
            if len(bytes.fromhex(address.secret)) != _SECRET_BYTES or not re.fullmatch(r"[-a-z0-9]+", address.local):
                raise ValueError(f"{address.local!r} is no address")  # noqa: TRY301 - handled like unreadable text
        except ValueError as error:
            raise CollectiveError(
                f"the address of rank {rank} in the store cannot be read: {error}; does another program use the store?"
            ) from error
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The arguments of `connect_mesh` that all of its steps need, and the deadline."""

    store: Store
    name: str
    ranks: Sequence[int]
    group_rank: int
    one_host: bool
    timeout: float
    deadline: float
    check_alive: Callable[[Callable[[], Sequence[int]]], None]


def connect_mesh(
    *,
    store: Store,
    name: str,
    ranks: Sequence[int],
    group_rank: int,
    one_host: bool,
    own_address: Callable[[], str],
    timeout: float,
    check_alive: Callable[[Callable[[], Sequence[int]]], None],
) -> Mesh:
    """Connect to the other members of a new group.

    Collective over the members.

    Args:
        store: The store that the members share.
        name: The name of the group, the same on all members and different from all other groups.
        ranks: The global ranks of the members.
        group_rank: The index of this process in `ranks`.
        one_host: All members are known to be on this host. Then no entry of the store can direct a member to another
            host.
        own_address: Returns the name or address of this host for other hosts.
        timeout: Seconds to wait for the other members.
        check_alive: Called while waiting, with a function that returns the awaited ranks; raises if one is dead. A
            member that has made its connections may have exited already, so ranks that are not awaited do not count.

    Raises:
        CollectiveError: A member could not be reached.
        CollectiveTimeoutError: Some members did not connect in time.
    """
    group = _Group(
        store=store,
        name=name,
        ranks=ranks,
        group_rank=group_rank,
        one_host=one_host,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        check_alive=check_alive,
    )
    connections: dict[int, socket.socket] = {}
    listeners: list[socket.socket] = []
    try:
        host = f"{host_id()}/{network_id()}"
        hosts = _NO_HOSTS if one_host else _exchange_hosts(group, host)
        listeners.append(listen_locally())
        if hosts:
            listeners.append(listen(0, one_host=False))
        secret = _publish_address(group, listeners, host, own_address() if hosts else "")
        for other, text in enumerate(_read(group, "address", group_rank, hosts)):
            address = _Address.read(text, ranks[other])
            is_local = not hosts or address.host == host
            connections[other] = _connect(group, other, address, is_local=is_local)
        _accept(group, listeners, secret, connections, hosts)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        for listener in listeners:
            listener.close()
    return Mesh(name, ranks, connections, hosts)


def _exchange_hosts(group: _Group, host: str) -> Mapping[int, str]:
    """Return the host names of the members, by rank; empty if all members report the same host."""
    group.store.set(f"{group.name}/host/{group.group_rank}", f"{host} {socket.gethostname()}")
    reported = [other.partition(" ") for other in _read(group, "host", len(group.ranks))]
    if all(other == host for other, _, _ in reported):
        return _NO_HOSTS
    names = (printable(shortened(name, _MAX_HOST_NAME)) for _, _, name in reported)
    return dict(zip(group.ranks, names, strict=True))


def _publish_address(group: _Group, listeners: Sequence[socket.socket], host: str, remote: str) -> bytes:
    """Write the address of this member to the store, and return its secret."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    own = _Address(
        host=host,
        local=local_name(listeners[0]),
        remote=remote,
        port=listeners[1].getsockname()[1] if len(listeners) > 1 else 0,
        secret=secret.hex(),
    )
    group.store.set(f"{group.name}/address/{group.group_rank}", encode_line(own))
    return secret


def _read(group: _Group, key: str, count: int, hosts: Mapping[int, str] = _NO_HOSTS) -> list[str]:
    """Wait until the first `count` members have written a key to the store, and return their values."""
    keys = [f"{group.name}/{key}/{group_rank}" for group_rank in range(count)]
    pause, max_pause = _PAUSE_SECONDS

    def awaited() -> list[int]:
        return [rank for rank, key in zip(group.ranks, keys, strict=False) if not group.store.check([key])]

    while keys and not group.store.check(keys):
        group.check_alive(awaited)
        if time.monotonic() > group.deadline:
            raise _timeout_error(group, awaited(), hosts)
        time.sleep(pause)
        pause = min(2 * pause, max_pause)
    return [value.decode(errors="replace") for value in group.store.multi_get(keys)] if keys else []


def _connect(group: _Group, group_rank: int, address: _Address, *, is_local: bool) -> socket.socket:
    """Connect to a member, and send the greeting."""
    where = address.local if is_local else f"{address.remote}:{address.port}"
    try:
        if is_local:
            connection = _connect_locally(group, group_rank, address.local)
        else:
            timeout = max(0.1, group.deadline - time.monotonic())
            connection = socket.create_connection((address.remote, address.port), timeout=timeout)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unreachable_error(group, group_rank, where, error) from error
    try:
        if not admit(connection):
            raise ConnectionRefusedError("it belongs to another user")
        connection.sendall(_GREETING.pack(bytes.fromhex(address.secret), group.group_rank))
    except OSError as error:
        connection.close()
        raise _unreachable_error(group, group_rank, where, error) from error
    return connection


def _connect_locally(group: _Group, group_rank: int, name: str) -> socket.socket:
    if sys.platform != "linux":
        return socket.create_connection((LOOPBACK, int(name)), timeout=max(0.1, group.deadline - time.monotonic()))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CHECK_SECONDS)
        while True:
            try:
                connection.connect(f"\0{name}")
            except BlockingIOError:  # the backlog of the listening socket is full
                group.check_alive(lambda: [group.ranks[group_rank]])
                if time.monotonic() > group.deadline:
                    raise
                time.sleep(_CHECK_SECONDS)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def _accept(
    group: _Group,
    listeners: Sequence[socket.socket],
    secret: bytes,
    connections: dict[int, socket.socket],
    hosts: Mapping[int, str],
) -> None:
    """Accept the connections of the members after this one."""
    expected = set(range(group.group_rank + 1, len(group.ranks)))
    idle = 0
    with Acceptor(listeners, admits=admit) as acceptor:
        while expected:
            if time.monotonic() > group.deadline:
                late = [group.ranks[group_rank] for group_rank in sorted(expected)]
                raise _timeout_error(group, late, hosts, acceptor.rejected_text())
            try:
                clients = acceptor.wait(_CHECK_SECONDS)
            except JoinError as error:
                raise CollectiveError(f"rank {group.ranks[group.group_rank]}: {error}") from error
            idle = 0 if clients else idle + 1
            # One wait without clients is no reason to check: a member may have connected and exited meanwhile. That
            # wait accepted its connection, and the next one reads its greeting.
            if idle > 1:
                group.check_alive(lambda: [group.ranks[group_rank] for group_rank in expected])
            for client in clients:
                # Read no more than the greeting: the bytes after it are frames, which the mesh reads.
                is_connected = client.read(_GREETING.size - len(client.received))
                group_rank = _greeted(client, secret)
                if group_rank in expected:
                    expected.remove(group_rank)
                    connections[group_rank] = acceptor.release(client)
                elif not is_connected or group_rank is not None:
                    acceptor.reject(client)


def _timeout_error(
    group: _Group, ranks: Sequence[int], hosts: Mapping[int, str], rejected: str = ""
) -> CollectiveTimeoutError:
    own = group.ranks[group.group_rank]
    return CollectiveTimeoutError(
        f"{ranks_on_hosts_text(ranks, hosts)} did not connect to rank {own} in {group.timeout:g} s.{rejected}"
    )


def _unreachable_error(group: _Group, group_rank: int, where: str, error: Exception) -> CollectiveError:
    hint = (
        "; the launcher, or an address on loopback, places all ranks on one host: are they?" if group.one_host else ""
    )
    return CollectiveError(f"rank {group.ranks[group_rank]} cannot be reached at {where}: {error}{hint}")


def _greeted(client: Client, secret: bytes) -> int | None:
    """Return the group rank that a client sent, -1 if its secret is wrong; None if the greeting is incomplete."""
    if len(client.received) < _GREETING.size:
        return None
    shown, group_rank = _GREETING.unpack(client.received)
    return int(group_rank) if hmac.compare_digest(shown, secret) else -1
