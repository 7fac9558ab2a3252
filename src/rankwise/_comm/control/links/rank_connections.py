"""The connection to one rank before this one, and those of the ranks after it: with a greeting, or a proof."""

from __future__ import annotations

import hmac
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.links.sockets import admit
from rankwise._net.acceptor import Acceptor, Client
from rankwise._net.addresses import LOOPBACK
from rankwise._net.job_secret import SECRET, JobSecret
from rankwise._net.json_lines import decode_line
from rankwise._net.polling import wait_readable
from rankwise._net.rank_proof import AcceptedProofs, connection_key, send_hello, send_proof
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import CollectiveError, CollectiveTimeoutError, JoinError

SECRET_BYTES: Final = 16
# The secret, and the group rank of the connecting member.
_GREETING: Final = struct.Struct(f"<{SECRET_BYTES}sI")
_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a member: `local` for ranks of its own host, `remote` and `port` for other hosts."""

    host: str
    local: str
    remote: str
    port: int
    secret: str

    @classmethod
    def read(cls, text: str, rank: int) -> Address:
        """Return the address that a rank wrote to the store.

        Raises:
            CollectiveError: The text is not an address.
        """
        try:
            address = decode_line(cls, text)
            if len(bytes.fromhex(address.secret)) != SECRET_BYTES or not re.fullmatch(r"[-a-z0-9]+", address.local):
                raise ValueError(f"{address.local!r} is no address")  # noqa: TRY301 - handled like unreadable text
        except ValueError as error:
            raise CollectiveError(
                f"the address of rank {rank} in the store cannot be read: {error}; does another program use the store?"
            ) from error
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The arguments of connecting the ranks of a session that all of its steps need, and the deadline.

    `watched` are the group ranks that connect to the first member twice: see `HostConnections`.
    """

    store: Store
    ranks: Sequence[int]
    group_rank: int
    one_host: bool
    secret: JobSecret | None
    timeout: float
    deadline: float
    check_alive: Callable[[Callable[[], Sequence[int]]], None]
    watched: Sequence[int] = ()


def connect_to(
    group: Attempt, group_rank: int, address: Address, *, is_local: bool, has_hosts: bool, is_second: bool = False
) -> tuple[socket.socket, Callable[[], None]]:
    """Connect to a member, and send the greeting; with several hosts, the first message of the proof.

    Args:
        group, group_rank, address: The arguments of all, the member, and its address.
        is_local: It is on this host.
        has_hosts: There are several hosts.
        is_second: It is the second connection of a watched member: it gives a number beyond those of members.

    Returns:
        The connection, and the function that ends the proof.
    """
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
        if has_hosts:
            hello = send_hello(connection, group.group_rank + (len(group.ranks) if is_second else 0))
            return connection, partial(_prove, group, group_rank, address, connection, where, hello)
        connection.sendall(_GREETING.pack(bytes.fromhex(address.secret), group.group_rank))
    except OSError as error:
        connection.close()
        raise _unreachable_error(group, group_rank, where, error) from error
    return connection, lambda: None


def _prove(
    group: Attempt, group_rank: int, address: Address, connection: socket.socket, where: str, hello: bytes
) -> None:
    """End the proof that this rank and another one belong to the same job."""
    key = connection_key(group.secret, bytes.fromhex(address.secret))
    try:
        while not wait_readable({group_rank: connection}, _CHECK_SECONDS):
            group.check_alive(lambda: [group.ranks[group_rank]])
            if time.monotonic() > group.deadline:
                raise TimeoutError(f"no answer in {group.timeout:g} s")
        connection.settimeout(max(0.1, group.deadline - time.monotonic()))
        if not send_proof(connection, key, hello):
            raise ConnectionRefusedError(
                f"what listens there does not prove that it is this rank: it has another {SECRET}, or is "
                "another program"
            )
    except OSError as error:
        connection.close()
        raise _unreachable_error(group, group_rank, where, error) from error


def _connect_locally(group: Attempt, group_rank: int, name: str) -> socket.socket:
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


def accept_others(
    group: Attempt,
    listeners: Sequence[socket.socket],
    secret: bytes,
    connections: dict[int, socket.socket],
    hosts: Mapping[int, str],
) -> None:
    """Accept the connections of the members after this one; second ones are added under the inverted rank, `~rank`."""
    size = len(group.ranks)
    expected = set(range(group.group_rank + 1, size))
    if group.group_rank == 0:
        expected.update(size + member for member in group.watched)
    proofs = AcceptedProofs(connection_key(group.secret, secret)) if hosts else None
    idle = 0
    with Acceptor(listeners, admits=admit) as acceptor:
        while expected:
            if time.monotonic() > group.deadline:
                late = [group.ranks[member] for member in sorted({number % size for number in expected})]
                raise timeout_error(group, late, hosts, acceptor.rejected_text())
            try:
                clients = acceptor.wait(_CHECK_SECONDS)
            except JoinError as error:
                raise CollectiveError(f"rank {group.ranks[group.group_rank]}: {error}") from error
            idle = 0 if clients else idle + 1
            # One wait without clients is no reason to check: a member may have connected and exited meanwhile. That
            # wait accepted its connection, and the next one reads its greeting.
            if idle > 1:
                group.check_alive(lambda: [group.ranks[number % size] for number in expected])
            for client in clients:
                is_connected, number = _read_number(client, secret, proofs)
                if number in expected:
                    expected.remove(number)
                    rank = group.ranks[number % size]
                    connections[rank if number < size else ~rank] = acceptor.release(client)
                elif not is_connected or number is not None:
                    acceptor.reject(client)
                    if proofs is not None:
                        proofs.forget(client)


def timeout_error(
    group: Attempt, ranks: Sequence[int], hosts: Mapping[int, str], rejected: str = ""
) -> CollectiveTimeoutError:
    own = group.ranks[group.group_rank]
    return CollectiveTimeoutError(
        f"{ranks_on_hosts_text(ranks, hosts)} did not connect to rank {own} in {group.timeout:g} s.{rejected}"
    )


def _unreachable_error(group: Attempt, group_rank: int, where: str, error: Exception) -> CollectiveError:
    hint = (
        "; the launcher, or an address on loopback, places all ranks on one host: are they?" if group.one_host else ""
    )
    return CollectiveError(f"rank {group.ranks[group_rank]} cannot be reached at {where}: {error}{hint}")


def _read_number(client: Client, secret: bytes, proofs: AcceptedProofs | None) -> tuple[bool, int | None]:
    """Read from a client, and return whether it is connected, and the number that it has identified itself by."""
    # No more than the greeting: the bytes after it are frames, which the mesh reads.
    if proofs is None:
        return client.read(_GREETING.size - len(client.received)), _greeted(client, secret)
    return client.read(proofs.missing(client)), proofs.rank_of(client)


def _greeted(client: Client, secret: bytes) -> int | None:
    """Return the group rank that a client sent, -1 if its secret is wrong; None if the greeting is incomplete."""
    if len(client.received) < _GREETING.size:
        return None
    shown, group_rank = _GREETING.unpack(client.received)
    return int(group_rank) if hmac.compare_digest(shown, secret) else -1
