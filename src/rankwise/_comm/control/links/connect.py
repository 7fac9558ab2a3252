"""How the ranks of a session come together: which of them share a host and its page, and who talks to other hosts.

Ranks of one host connect to the first of them, from which they get the page, by sockets whose other end must belong to
the same user, whatever other users write to the store. The ranks of a host with a page are one unit; its first rank
leads it. Every other rank is a unit of its own. Leaders connect to each other in a tree; all other connections are made
when they are needed. Between hosts both sides prove that they know the secret of the job, and without one that in the
store. See SECURITY.md.
"""

from __future__ import annotations

import functools
import logging
import socket
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.links.connector import FRAMES, PAGE, WATCHERS, Connector
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.places import Hosts, Places, Units
from rankwise._comm.control.page.handshake import share_page
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.tree import Tree
from rankwise._net.host import host_id, network_id
from rankwise._net.job_secret import NO_SECRET, JobSecret
from rankwise._net.json_lines import MAX_LINE_BYTES, decode_line, encode_line
from rankwise._net.polling import SharedEventLoop
from rankwise._rendezvous.store_reads import are_written, get_all, longest_pause
from rankwise._text import ranks_on_hosts_text
from rankwise.errors import CollectiveError, CollectiveTimeoutError

log = logging.getLogger(__name__)

# The shortest pause between two reads of the store, and the longest one with few ranks.
_PAUSE_SECONDS: Final = (0.0005, 0.02)
_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class HostConnections:
    """Connections between hosts for the processes that watch their ranks, which cannot read those of the ranks.

    Attributes:
        connections: On the first rank, one to the first rank of each other host that has a watch; on these, one to the
            first rank of all. By global rank.
        hosts: The name of each host, by its first rank.
        neighbours: The ranks of each host, by its first rank.
    """

    connections: Mapping[int, socket.socket]
    hosts: Mapping[int, str]
    neighbours: Mapping[int, Sequence[int]]

    def neighbours_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the host of a rank."""
        return next(ranks for ranks in self.neighbours.values() if rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The arguments of `connect` that all of its steps need, and the deadline."""

    store: Store
    ranks: Sequence[int]
    rank: int
    one_host: bool
    timeout: float
    deadline: float
    check_alive: Callable[[Callable[[], Sequence[int]]], None]
    places: Places | None = None

    def read(self, keys: Mapping[str, int]) -> list[bytes]:
        """Wait until ranks have written keys to the store, each a key of its own, and return their values."""
        missing = list(keys)
        pause, max_pause = _PAUSE_SECONDS[0], longest_pause(_PAUSE_SECONDS[1], len(self.ranks))

        def awaited() -> list[int]:
            return [keys[key] for key in missing if not self.store.check([key])]

        while not are_written(self.store, missing):
            self.check_alive(awaited)
            if time.monotonic() > self.deadline:
                raise self.late_error(awaited())
            time.sleep(pause)
            pause = min(2 * pause, max_pause)
        return get_all(self.store, list(keys))

    def wait(self, connector: Connector, awaited: Callable[[], Collection[tuple[int, int]]]) -> None:
        """Wait until connections are made.

        Args:
            connector: It makes them.
            awaited: Returns those that are not made yet: their ranks and purposes.

        Raises:
            CollectiveError: One cannot be made.
            CollectiveTimeoutError: Some were not made in time.
        """
        idle = 0
        while True:
            seen = connector.loop.num_events
            missing = sorted(awaited())
            if not missing:
                return
            if connector.shortage:
                raise CollectiveError(f"rank {self.rank}: {connector.shortage}")
            for rank, purpose in missing:
                if why := connector.failure(rank, purpose):
                    raise self._unreachable_error(rank, why)
            if time.monotonic() > self.deadline:
                for rank, purpose in missing:
                    if where := connector.where(rank, purpose):
                        why = f"cannot be reached at {where}: no answer in {self.timeout:g} s"
                        raise self._unreachable_error(rank, why)
                raise self.late_error(_ranks_of(missing), connector.rejected_text())
            # One wait without an event is no reason to check: a rank may have connected and exited meanwhile. That wait
            # accepted its connection, and the next one reads its proof.
            idle = 0 if connector.wait(seen, _CHECK_SECONDS) else idle + 1
            if idle > 1:
                self.check_alive(lambda: _ranks_of(awaited()))

    def late_error(self, ranks: Sequence[int], rejected: str = "") -> CollectiveTimeoutError:
        """Return the error of ranks that did not come in time."""
        names = {} if self.places is None else {rank: self.places.host_name(rank) for rank in ranks}
        late = ranks_on_hosts_text(ranks, names)
        return CollectiveTimeoutError(f"{late} did not connect to rank {self.rank} in {self.timeout:g} s.{rejected}")

    def _unreachable_error(self, rank: int, why: str) -> CollectiveError:
        hint = "; the launcher, or an address on loopback, places all ranks on one host: are they?"
        return CollectiveError(f"rank {rank} {why}{hint if self.one_host else ''}")


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
        ranks: The global ranks, in ascending order.
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
    # All ranks take the same way, and know it without asking, or by the same entries of the store, which the first rank
    # of all collects from the others, so that each rank reads and writes only a few:
    # 1. Unless there is one host, each rank writes its host; the first one reads them, and writes the list of hosts.
    # 2. The ranks of each host share a page, or find that they cannot.
    # 3. With several hosts, the first rank of each writes whether it has a page; the first one of all writes the list.
    # 4. With several hosts, the leaders connect, and the first rank of each watched host a second time to the first one
    #    of all, for the watchers: a watcher has to hear the others when its ranks hold Python's lock, or are stopped.
    attempt = _Attempt(
        store=store,
        ranks=ranks,
        rank=rank,
        one_host=one_host,
        timeout=timeout,
        deadline=time.monotonic() + timeout,
        check_alive=check_alive,
    )
    hosts = Hosts.one(len(ranks)) if one_host else _exchange_hosts(attempt, watched=on_hosts is not None)
    places = Places(ranks, hosts)
    attempt = replace(attempt, places=places)
    by_host, number = places.by_host(), places.host(rank)
    if places.num_hosts > 1 and secret is None and rank == ranks[0]:
        _warn_without_secret()
    page = None
    links = None
    try:
        if shares_pages and len(by_host[number]) > 1:
            page = _share_page(attempt, by_host[number], shares_tensors=shares_tensors)
        has_page = (
            _exchange_pages(attempt, by_host, number, page)
            if places.num_hosts > 1 and shares_pages
            else [page is not None] * len(by_host)
        )
        links = Links(
            rank, units=Units(places, has_page), page=page, store=store, secret=secret, own_address=own_address
        )
        if len(links.units) > 1:
            watched = [there[0] for mark, there in zip(hosts.watched, by_host, strict=True) if mark == "1"]
            watchers = _connect_leaders(attempt, links, watched)
            if on_hosts is not None and places.num_hosts > 1:
                names = {there[0]: places.host_name(there[0]) for there in by_host}
                on_hosts(HostConnections(watchers, names, {there[0]: there for there in by_host}))
    except BaseException:
        if links is not None:
            links.close()
        elif page is not None:
            page.close()
        raise
    return links


@functools.cache
def _warn_without_secret() -> None:
    """Log, once, that the hosts cannot know each other."""
    log.warning("%s", NO_SECRET)


def _exchange_hosts(attempt: _Attempt, *, watched: bool) -> Hosts:
    """Return the hosts of the session."""
    keys = {f"host/{member}": rank for member, rank in enumerate(attempt.ranks)}
    own = f"host/{attempt.ranks.index(attempt.rank)}"
    first, size = attempt.ranks[0], len(attempt.ranks)
    attempt.store.set(own, f"{host_id()}/{network_id()} {int(watched)} {socket.gethostname()}")
    if attempt.rank == first:
        hosts = Hosts.of([text.decode(errors="replace") for text in attempt.read(keys)])
        attempt.store.set("hosts", zlib.compress(encode_line(hosts).encode()))  # type: ignore[arg-type]  # takes bytes
    else:
        (packed,) = attempt.read({"hosts": first})
        try:
            hosts = decode_line(Hosts, zlib.decompressobj().decompress(packed, MAX_LINE_BYTES))
            if not hosts.are_of(size):
                raise ValueError("it is not about these ranks")  # noqa: TRY301 - handled like unreadable text
        except (ValueError, zlib.error) as error:
            raise CollectiveError(
                f"the list of hosts of rank {first} in the store cannot be read: {error}; does another program use the "
                "store?"
            ) from error
    return hosts if len(hosts.names) > 1 else Hosts.one(size)


def _share_page(attempt: _Attempt, ranks: Sequence[int], *, shares_tensors: bool) -> HostPage | None:
    """Connect the ranks of a host to the first of them, and share a page."""
    first = ranks[0]
    connections: dict[int, socket.socket] = {}
    here = Places(attempt.ranks, Hosts.one(len(attempt.ranks)))  # no other host is asked
    connector = Connector(SharedEventLoop(), store=attempt.store, rank=attempt.rank, key="page", places=here)
    try:
        if attempt.rank == first:
            connector.expected.update((other, PAGE) for other in ranks[1:])
            connector.listen()
        else:
            connector.expected.add((first, PAGE))
            connector.request(first, PAGE)
        attempt.wait(connector, connector.expected.copy)
        connections.update((rank, connector.made.pop((rank, purpose))) for rank, purpose in list(connector.made))
    finally:
        connector.loop.close()
        connector.close()
    try:
        return share_page(
            connections,
            ranks=ranks,
            rank=attempt.rank,
            deadline=attempt.deadline,
            check_alive=attempt.check_alive,
            shares_tensors=shares_tensors,
        )
    finally:
        for connection in connections.values():
            connection.close()


def _exchange_pages(
    attempt: _Attempt, by_host: Sequence[Sequence[int]], number: int, page: HostPage | None
) -> Sequence[bool]:
    """Return which hosts have a page."""
    first, leader = attempt.ranks[0], by_host[number][0]
    if attempt.rank == leader and len(by_host[number]) > 1:
        attempt.store.set(f"paged/{leader}", str(int(page is not None)))
    if attempt.rank == first:
        several = {f"paged/{there[0]}": there[0] for there in by_host if len(there) > 1}
        answers = dict(zip(several.values(), attempt.read(several), strict=True))
        attempt.store.set("pages", "".join(str(int(answers.get(there[0]) == b"1")) for there in by_host))
    (pages,) = attempt.read({"pages": first})
    has_page = [each == ord("1") for each in pages]
    if len(has_page) != len(by_host) or has_page[number] != (page is not None):
        raise CollectiveError(
            f"the list of pages of rank {first} in the store cannot be read; does another program use the store?"
        )
    return has_page


def _connect_leaders(attempt: _Attempt, links: Links, watched: Sequence[int]) -> dict[int, socket.socket]:
    """Connect the leaders of units; return the second connections, for the watchers."""
    units, first = links.units, attempt.ranks[0]
    own, connector, neighbours = units.of(attempt.rank), links.connector, list[int]()
    if attempt.rank == units.leader(own):
        links.listen()
        neighbours = [units.leader(unit) for unit in Tree(len(units)).neighbours(own)]
    if first in watched and attempt.rank in watched:
        connector.expected.update((rank, WATCHERS) for rank in (watched[1:] if attempt.rank == first else [first]))
        if attempt.rank != first:
            connector.request(first, WATCHERS)
    peers = [links.peer(rank) for rank in neighbours]
    attempt.wait(connector, lambda: [*connector.expected, *((p.rank, FRAMES) for p in peers if not p.is_connected)])
    if attempt.rank == units.leader(own):
        links.watch(peers)
    return {rank: connector.made.pop((rank, purpose)) for rank, purpose in list(connector.made) if purpose == WATCHERS}


def _ranks_of(connections: Collection[tuple[int, int]]) -> list[int]:
    return sorted({rank for rank, _ in connections})
