"""How the ranks of a session connect: to share the pages of their hosts, and to each other where there are several.

Ranks write their addresses to the store. On one host all connect to the first rank, from which they get the page. On
several hosts, and where there is no page, each connects to those before it, and accepts those after it. On one host the
connections are sockets whose other end must belong to the same user, whatever other users write to the store. Between
hosts the connecting side must send a secret from the store. See SECURITY.md.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.links import Links
from rankwise._comm.control.page_handshake import share_page
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
    """The arguments of `connect` that all of its steps need, and the deadline."""

    store: Store
    ranks: Sequence[int]
    group_rank: int
    one_host: bool
    timeout: float
    deadline: float
    check_alive: Callable[[Callable[[], Sequence[int]]], None]


def connect(
    *,
    store: Store,
    ranks: Sequence[int],
    rank: int,
    one_host: bool,
    own_address: Callable[[], str],
    timeout: float,
    check_alive: Callable[[Callable[[], Sequence[int]]], None],
) -> Links:
    """Connect the ranks of a session.

    Collective over the ranks.

    Args:
        store: The store that the ranks share, under a prefix of this session.
        ranks: The global ranks.
        rank: The global rank of this process.
        one_host: All ranks are known to be on this host. Then no entry of the store can direct a rank to another host.
        own_address: Returns the name or address of this host for other hosts.
        timeout: Seconds to wait for the other ranks.
        check_alive: Called while waiting, with a function that returns the awaited ranks; raises if one is dead. A
            rank that has made its connections may have exited already, so ranks that are not awaited do not count.

    Raises:
        CollectiveError: A rank could not be reached.
        CollectiveTimeoutError: Some ranks did not connect in time.
    """
    group = _Group(
        store=store,
        ranks=ranks,
        group_rank=ranks.index(rank),
        one_host=one_host,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        check_alive=check_alive,
    )
    host = f"{host_id()}/{network_id()}"
    hosts = {} if one_host else _exchange_hosts(group)
    same_host = all(other == host for other, _ in hosts.values())
    names = {} if same_host else {other: name for other, (_, name) in hosts.items()}
    neighbours = [other for other in ranks if not names or hosts[other][0] == host]
    connections: dict[int, socket.socket] = {}
    try:
        if not names:
            _connect_all(group, "first", {0}, connections, names, "")
        else:
            _connect_all(group, "all", set(range(len(ranks))), connections, names, own_address())
        page = None
        if len(neighbours) > 1:
            page = share_page(
                connections, ranks=neighbours, rank=rank, deadline=group.deadline, check_alive=check_alive
            )
        if page is None and not names:
            _close_all(connections)
            _connect_all(group, "all", set(range(len(ranks))), connections, names, "")
        return Links(rank, connections=connections, hosts=names, page=page)
    except BaseException:
        _close_all(connections)
        raise


def _connect_all(
    group: _Group,
    key: str,
    servers: Container[int],
    connections: dict[int, socket.socket],
    hosts: Mapping[int, str],
    own_address: str,
) -> None:
    """Connect to the members before this one, and accept those after it, where the one before is a server.

    Args:
        group: The arguments.
        key: The key of the addresses in the store.
        servers: The group ranks of the members that accept connections.
        connections: The connections, by global rank; they are added here.
        hosts: The names of the hosts by global rank, or empty.
        own_address: The address of this host for other hosts; "" if all are on this host.
    """
    host = f"{host_id()}/{network_id()}"
    listeners: list[socket.socket] = []
    secret = b""
    try:
        if group.group_rank in servers:
            listeners.append(listen_locally())
            if hosts:
                listeners.append(listen(0, one_host=False))
            secret = _publish_address(group, key, listeners, host, own_address)
        before = [member for member in range(group.group_rank) if member in servers]
        for member, text in zip(before, _read(group, key, before, hosts), strict=True):
            address = _Address.read(text, group.ranks[member])
            is_local = not hosts or address.host == host
            connections[group.ranks[member]] = _connect(group, member, address, is_local=is_local)
        if listeners:
            _accept(group, listeners, secret, connections, hosts)
    finally:
        for listener in listeners:
            listener.close()


def _close_all(connections: dict[int, socket.socket]) -> None:
    while connections:
        connections.popitem()[1].close()


def _exchange_hosts(group: _Group) -> dict[int, tuple[str, str]]:
    """Return the id and the name of the host of each rank."""
    group.store.set(f"host/{group.group_rank}", f"{host_id()}/{network_id()} {socket.gethostname()}")
    reported = [text.partition(" ") for text in _read(group, "host", range(len(group.ranks)))]
    return {
        rank: (host, printable(shortened(name, _MAX_HOST_NAME)))
        for rank, (host, _, name) in zip(group.ranks, reported, strict=True)
    }


def _publish_address(group: _Group, key: str, listeners: Sequence[socket.socket], host: str, remote: str) -> bytes:
    """Write the address of this member to the store, and return its secret."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    own = _Address(
        host=host,
        local=local_name(listeners[0]),
        remote=remote,
        port=listeners[1].getsockname()[1] if len(listeners) > 1 else 0,
        secret=secret.hex(),
    )
    group.store.set(f"{key}/{group.group_rank}", encode_line(own))
    return secret


def _read(group: _Group, key: str, members: Sequence[int], hosts: Mapping[int, str] = _NO_HOSTS) -> list[str]:
    """Wait until these members have written a key to the store, and return their values."""
    keys = {f"{key}/{member}": group.ranks[member] for member in members}
    pause, max_pause = _PAUSE_SECONDS

    def awaited() -> list[int]:
        return [rank for name, rank in keys.items() if not group.store.check([name])]

    while keys and not group.store.check(list(keys)):
        group.check_alive(awaited)
        if time.monotonic() > group.deadline:
            raise _timeout_error(group, awaited(), hosts)
        time.sleep(pause)
        pause = min(2 * pause, max_pause)
    return [value.decode(errors="replace") for value in group.store.multi_get(list(keys))] if keys else []


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
                    connections[group.ranks[group_rank]] = acceptor.release(client)
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
