"""How the ranks of a session connect: to share the pages of their hosts, and to each other where there are several.

Ranks write their addresses to the store. On one host all connect to the first rank, from which they get the page. On
several hosts, where no memory is shared for tensors, and where ranks are threads of one process, each connects to
those before it, and accepts those after it. On one host the connections are sockets whose other end must belong to the
same user, whatever other users write to the store. Between hosts both sides prove that they know the secret of the
job, and without one that in the store. See SECURITY.md.
"""

from __future__ import annotations

import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch.distributed import Store

from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.rank_connections import (
    SECRET_BYTES,
    Address,
    Attempt,
    accept_others,
    connect_to,
    timeout_error,
)
from rankwise._comm.control.links.sockets import listen_locally, local_name
from rankwise._comm.control.page.handshake import share_page
from rankwise._net.acceptor import listen
from rankwise._net.host import host_id, network_id
from rankwise._net.job_secret import NO_SECRET, JobSecret
from rankwise._net.json_lines import encode_line
from rankwise.errors import printable, shortened

log = logging.getLogger(__name__)

# The shortest and the longest pause between two reads of the store.
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_MAX_HOST_NAME: Final = 64
_NO_HOSTS: Final[Mapping[int, str]] = {}


class _Host(NamedTuple):
    """The host of a rank, and whether that rank has a watch over hangs."""

    id: str
    watched: bool
    name: str


@dataclass(frozen=True, slots=True)
class HostConnections:
    """Connections between hosts for the processes that watch their ranks, which cannot read those of the ranks.

    Attributes:
        connections: On the first rank, one to the first rank of each other host that has a watch; on these, one to the
            first rank of all. By global rank.
        hosts: The name of the host of each rank.
        neighbours: The ranks of each host, by its first rank.
    """

    connections: Mapping[int, socket.socket]
    hosts: Mapping[int, str]
    neighbours: Mapping[int, Sequence[int]]

    def neighbours_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the host of a rank."""
        return next(ranks for ranks in self.neighbours.values() if rank in ranks)


def connect(
    *,
    store: Store,
    ranks: Sequence[int],
    rank: int,
    one_host: bool,
    own_address: Callable[[], str],
    secret: JobSecret | None = None,
    timeout: float,
    check_alive: Callable[[Callable[[], Sequence[int]]], None],
    shares_pages: bool = True,
    shares_tensors: bool = True,
    on_hosts: Callable[[HostConnections], None] | None = None,
) -> Links:
    """Connect the ranks of a session.

    Collective over the ranks.

    Args:
        store: The store that the ranks share, under a prefix of this session.
        ranks: The global ranks.
        rank: The global rank of this process.
        one_host: All ranks are known to be on this host. Then no entry of the store can direct a rank to another host.
        own_address: Returns the name or address of this host for other hosts.
        secret: The secret of the job, which ranks of several hosts prove to know; None without one.
        timeout: Seconds to wait for the other ranks.
        check_alive: Called while waiting, with a function that returns the awaited ranks; raises if one is dead. A
            rank that has made its connections may have exited already, so ranks that are not awaited do not count.
        shares_pages: Ranks of one host agree through a page of memory, as they can if they are processes.
        shares_tensors: They may use that memory for tensors too, if all of them may.
        on_hosts: Takes the connections for the processes that watch the hosts, if there are several hosts; None if this
            rank has no watch.

    Raises:
        CollectiveError: A rank could not be reached.
        CollectiveTimeoutError: Some ranks did not connect in time.
    """
    # All ranks take the same way, and know it without asking, or by the same entries of the store:
    # - One host: each rank connects to the first one, which hands out the page over these connections. After that they
    #   are closed. If any rank cannot map the page, or may not use it for tensors, the first one tells all of them, and
    #   they connect each to each, as ranks without pages do.
    # - Several hosts: each connects to those before it and accepts those after it, so that no two connect twice. The
    #   proof of a connection is answered only by a rank that has come to accepting. So a rank first begins all its
    #   connections, and then ends their proofs: in another order, ranks would wait for each other in a circle.
    # - The first rank of each host hands out the page of its host, over connections that exist.
    # The first rank of a watched host connects to the first rank of all a second time, for the watchers: a watcher has
    # to hear the others when its ranks hold Python's lock, or are stopped.
    group = Attempt(
        store=store,
        ranks=ranks,
        group_rank=ranks.index(rank),
        one_host=one_host,
        secret=secret,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        check_alive=check_alive,
    )
    host = f"{host_id()}/{network_id()}"
    hosts = {} if one_host else _exchange_hosts(group, watched=on_hosts is not None)
    same_host = all(other.id == host for other in hosts.values())
    names = {} if same_host else {rank: other.name for rank, other in hosts.items()}
    neighbours_of = _by_host(hosts) if names else {}
    if names and hosts[ranks[0]].watched:
        first_ranks = [ranks.index(first) for first in neighbours_of if hosts[first].watched]
        group = replace(group, watched=first_ranks[1:])
    if names and secret is None and rank == ranks[0]:
        _warn_without_secret()
    neighbours = [other for other in ranks if not names or hosts[other].id == host]
    connections: dict[int, socket.socket] = {}
    page = None
    try:
        if not names and shares_pages:
            _connect_all(group, "first", {0}, connections, names, "")
        else:
            _connect_all(group, "all", set(range(len(ranks))), connections, names, own_address() if names else "")
        if len(neighbours) > 1 and shares_pages:
            page = share_page(
                connections,
                ranks=neighbours,
                rank=rank,
                deadline=group.deadline,
                check_alive=check_alive,
                shares_tensors=shares_tensors,
            )
        if not names and shares_pages:
            _close_all(connections)
            if page is None or not page.shares_tensors:
                _connect_all(group, "all", set(range(len(ranks))), connections, names, "")
        ids = {other: hosts[other].id for other in names}
        second = {~number: connections.pop(number) for number in list(connections) if number < 0}
        if on_hosts is not None and names:
            on_hosts(HostConnections(second, names, neighbours_of))
        return Links(rank, connections=connections, hosts=ids, host_names=names, page=page)
    except BaseException:
        _close_all(connections)
        if page is not None:
            page.close()
        raise


def _connect_all(
    group: Attempt,
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
        connections: The connections, by global rank, and second ones by the inverted rank; they are added here.
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
        begun: list[Callable[[], None]] = []
        for member, text in zip(before, _read(group, key, before, hosts), strict=True):
            address = Address.read(text, group.ranks[member])
            is_local = not hosts or address.host == host
            for is_second in (False, True) if not member and group.group_rank in group.watched else (False,):
                connection, prove = connect_to(
                    group, member, address, is_local=is_local, has_hosts=bool(hosts), is_second=is_second
                )
                rank = group.ranks[member]
                connections[~rank if is_second else rank] = connection
                begun.append(prove)
        for prove in begun:  # a member answers when it has connected to those before it
            prove()
        if listeners:
            accept_others(group, listeners, secret, connections, hosts)
    finally:
        for listener in listeners:
            listener.close()


@functools.cache
def _warn_without_secret() -> None:
    """Log, once, that the hosts cannot know each other."""
    log.warning("%s", NO_SECRET)


def _close_all(connections: dict[int, socket.socket]) -> None:
    while connections:
        connections.popitem()[1].close()


def _exchange_hosts(group: Attempt, *, watched: bool) -> dict[int, _Host]:
    """Return the host of each rank."""
    group.store.set(f"host/{group.group_rank}", f"{host_id()}/{network_id()} {int(watched)} {socket.gethostname()}")
    reported = _read(group, "host", range(len(group.ranks)))
    return {rank: _host(text) for rank, text in zip(group.ranks, reported, strict=True)}


def _host(text: str) -> _Host:
    host, _, rest = text.partition(" ")
    watched, _, name = rest.partition(" ")
    return _Host(host, watched == "1", printable(shortened(name, _MAX_HOST_NAME)))


def _by_host(hosts: Mapping[int, _Host]) -> dict[int, list[int]]:
    """Return the ranks of each host, by its first rank."""
    by_id: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        by_id.setdefault(host.id, []).append(rank)
    return {ranks[0]: ranks for ranks in by_id.values()}


def _publish_address(group: Attempt, key: str, listeners: Sequence[socket.socket], host: str, remote: str) -> bytes:
    """Write the address of this member to the store, and return its secret."""
    secret = secrets.token_bytes(SECRET_BYTES)
    own = Address(
        host=host,
        local=local_name(listeners[0]),
        remote=remote,
        port=listeners[1].getsockname()[1] if len(listeners) > 1 else 0,
        secret=secret.hex(),
    )
    group.store.set(f"{key}/{group.group_rank}", encode_line(own))
    return secret


def _read(group: Attempt, key: str, members: Sequence[int], hosts: Mapping[int, str] = _NO_HOSTS) -> list[str]:
    """Wait until these members have written a key to the store, and return their values."""
    keys = {f"{key}/{member}": group.ranks[member] for member in members}
    pause, max_pause = _PAUSE_SECONDS

    def awaited() -> list[int]:
        return [rank for name, rank in keys.items() if not group.store.check([name])]

    while keys and not group.store.check(list(keys)):
        group.check_alive(awaited)
        if time.monotonic() > group.deadline:
            raise timeout_error(group, awaited(), hosts)
        time.sleep(pause)
        pause = min(2 * pause, max_pause)
    return [value.decode(errors="replace") for value in group.store.multi_get(list(keys))] if keys else []
