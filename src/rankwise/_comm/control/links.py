"""The connections of a session, at most one to each other rank, which all groups share; and transfers of data on them.

Where ranks agree through the page of their host, a connection between two of them is made when they first transfer
data: the one with the higher rank connects, to the socket that the other one has published in the page.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from rankwise._comm.control.host_page import HostPage
from rankwise._comm.control.peer import Peer
from rankwise._comm.control.sockets import admit, listen_locally, local_name
from rankwise._net.polling import READABLE, WRITABLE, SharedEventLoop, poll
from rankwise.errors import CollectiveError, CollectiveTimeoutError

# The longest single wait. Between waits, signal handlers run (Ctrl-C) and lost ranks are noticed.
SLICE_SECONDS: Final = 0.5
# After a lost connection, wait so long for others: the member that left because another died may be noticed first.
_LOSS_SECONDS: Final = 0.1
# The wait while a connection transfers data of another group, in another thread.
_BUSY_SECONDS: Final = 0.001
_NO_INTEREST: Final = (False, False)
# The global rank of the process that connects.
_GREETING: Final = struct.Struct("<I")
_GREETING_SECONDS: Final = 5.0

_open_links: weakref.WeakSet[Links] = weakref.WeakSet()


class Links:
    """The connections of this rank.

    Attributes:
        rank: The global rank of this process.
        loop: The event loop of the session.
        page: The page of this host; None if ranks agree over connections.
        groups: The ids of the groups of which this rank is a member.
    """

    def __init__(
        self,
        rank: int,
        *,
        connections: Mapping[int, socket.socket],
        hosts: Mapping[int, str],
        page: HostPage | None,
    ) -> None:
        """Take over connections and a page.

        Args:
            rank: The global rank of this process.
            connections: The connections to other ranks, by global rank.
            hosts: The names of the hosts of the ranks, by global rank; empty if all are on this host.
            page: The page of this host, or None.

        Raises:
            OSError: Too few descriptors are left.
        """
        self.rank = rank
        self.loop = SharedEventLoop()
        self.page = page
        self.groups: set[int] = set()
        self._hosts = hosts
        # Without other hosts, ranks with a page send each other no frames, and connect when they transfer data.
        self._connects_late = page is not None and not hosts
        self._connecting = threading.Lock()
        self._listener: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        # The interest of the event loop in each peer: whether it reads, and writes.
        self._interest: dict[int, tuple[bool, bool]] = {}
        for other, connection in connections.items():
            self._add(other, connection)
        if page is not None:
            page.register(self.loop)
        if page is not None and self._connects_late:
            self._listener = listen_locally()
            self._listener.setblocking(False)
            page.publish_name(local_name(self._listener))
        _open_links.add(self)

    @property
    def same_host(self) -> bool:
        """All ranks are on this host."""
        return not self._hosts

    def host(self, rank: int) -> str:
        """Return the name of the host of a rank; "" if all ranks are on this host."""
        return self._hosts.get(rank, "")

    def peer(self, rank: int) -> Peer:
        """Return the connection to a rank."""
        return self._peers[rank]

    def update_interest(self, peer: Peer) -> None:
        """Make the event loop wait for what can be read from a peer, and sent to it, now."""
        wanted = peer.is_readable, bool(peer.num_unsent) and not peer.lost_reason
        if wanted == self._interest.get(peer.rank, _NO_INTEREST):
            return
        self._interest[peer.rank] = wanted
        if wanted == _NO_INTEREST:
            self.loop.unregister(peer.connection)
        else:
            reads, writes = wanted
            self.loop.register(
                peer.connection, partial(self.receive, peer) if reads else None, peer.flush if writes else None
            )

    def receive(self, peer: Peer) -> None:
        """Read the frames that have arrived from a peer."""
        peer.receive()
        self.update_interest(peer)

    def transfer(
        self,
        group: int,
        outgoing: Mapping[int, memoryview],
        incoming: Mapping[int, memoryview],
        *,
        call: str,
        timeout: float,
        lost_reason: Callable[[int], str],
    ) -> None:
        """Send data to ranks and fill buffers with theirs; both sides know the lengths.

        Args:
            group: The id of the group.
            outgoing: The data for each rank.
            incoming: The buffer for the data of each rank.
            call: The call, for error messages.
            timeout: Seconds without a byte sent or received.
            lost_reason: Returns why a rank takes part in the group no longer; "" if it does.

        Raises:
            CollectiveError: A rank is gone.
            CollectiveTimeoutError: No byte was sent or received for that long.
        """
        move = _Transfer(self, group, outgoing, incoming)
        last_progress, lost_since = time.monotonic(), 0.0
        try:
            while move.unsent or move.unfilled:
                if move.step():
                    last_progress = time.monotonic()
                    continue
                pending = sorted(move.unsent.keys() | move.unfilled.keys())
                lost = {rank: why for rank in pending if (why := self._lost_reason(rank) or lost_reason(rank))}
                if lost and time.monotonic() - (lost_since := lost_since or time.monotonic()) > _LOSS_SECONDS:
                    reasons = "; ".join(f"{self.name(rank)} {why}" for rank, why in lost.items())
                    raise CollectiveError(f"{call} failed: {reasons}")
                if time.monotonic() - last_progress > timeout:
                    slow = ", ".join(map(self.name, pending))
                    raise CollectiveTimeoutError(f"{call}: no data from or to {slow} for {timeout:g} s")
                self._wait(move, _LOSS_SECONDS if lost else SLICE_SECONDS)
        finally:
            move.abandon()
            for rank in self._interest.keys() & {*outgoing, *incoming}:
                self.update_interest(self._peers[rank])

    def name(self, rank: int) -> str:
        """Return a rank and its host: "rank 3 on node2"."""
        host = self.host(rank)
        return f"rank {rank}{f' on {host}' if host else ''}"

    def connected(self, rank: int) -> Peer | None:
        """Return the connection to a rank; None while it is being made. Does not wait."""
        peer = self._peers.get(rank)
        if peer is None and self._connects_late:
            with self._connecting:
                if rank in self._peers:
                    return self._peers[rank]
                self._connect(rank) if rank < self.rank else self._accept()
                peer = self._peers.get(rank)
        return peer

    def close(self) -> None:
        """Close all connections, and the page, without frames."""
        _open_links.discard(self)
        for peer in self._peers.values():
            peer.mark_lost("was left by this rank")
            peer.connection.close()
        self.loop.close()
        if self._listener is not None:
            self._listener.close()
        if self.page is not None:
            self.page.close()

    def _lost_reason(self, rank: int) -> str:
        peer = self._peers.get(rank)
        return "" if peer is None else peer.lost_reason

    def _wait(self, move: _Transfer, seconds: float) -> None:
        events, is_busy = move.events()
        numbers: set[int] = set()
        if self.page is not None:  # a rank that is lost is noticed by the event loop
            numbers.add(self.loop.fileno())
            if self._listener is not None and move.awaits_connection():
                numbers.add(self._listener.fileno())
        ready = poll(events | dict.fromkeys(numbers, READABLE), _BUSY_SECONDS if is_busy else seconds)
        if self.page is not None and any(number == self.loop.fileno() for number, _ in ready):
            self.loop.wait(self.loop.num_events, 0.0)

    def _add(self, rank: int, connection: socket.socket) -> None:
        self._peers[rank] = Peer(rank, self.host(rank), connection, expects_data=self.groups.__contains__)
        if not self._connects_late:
            self.update_interest(self._peers[rank])

    def _connect(self, rank: int) -> None:
        """Connect to a lower rank; do nothing if its socket has no room for another connection yet."""
        page = self.page
        if page is None:
            return
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(f"\0{page.name(page.ranks.index(rank))}")
            if not admit(connection):
                raise ConnectionRefusedError("it belongs to another user")
            connection.sendall(_GREETING.pack(self.rank))
        except BlockingIOError:
            connection.close()
        except OSError as error:
            connection.close()
            raise CollectiveError(f"rank {rank} cannot be reached by rank {self.rank}: {error}") from error
        else:
            self._add(rank, connection)

    def _accept(self) -> None:
        """Accept the connections of higher ranks that have arrived."""
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                raise CollectiveError(f"rank {self.rank} cannot accept connections of other ranks: {error}") from error
            rank = _greeting(connection) if admit(connection) else None
            if rank is None or rank in self._peers:
                connection.close()
            else:
                self._add(rank, connection)


class _Transfer:
    """A transfer of data of one group.

    Attributes:
        unsent: The rest of the data for each rank.
        unfilled: The rest of the buffer for the data of each rank.
    """

    def __init__(
        self, links: Links, group: int, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]
    ) -> None:
        self.unsent = dict(outgoing)
        self.unfilled = dict(incoming)
        self._links = links
        self._group = group
        self._begun: set[int] = set()

    def step(self) -> int:
        """Send and receive as much as possible without waiting, and return the number of bytes."""
        moved = 0
        for rank, data in list(self.unsent.items()):
            peer = self._links.connected(rank)
            sent = None if peer is None else peer.send_data(self._group, data, is_begun=rank in self._begun)
            if sent is None:
                continue
            self._begun.add(rank)
            moved += sent
            if sent == len(data):
                del self.unsent[rank]
            else:
                self.unsent[rank] = data[sent:]
        for rank, buffer in list(self.unfilled.items()):
            peer = self._links.connected(rank)
            received = 0 if peer is None else peer.receive_data(self._group, buffer)
            moved += received
            if received == len(buffer):
                del self.unfilled[rank]
            else:
                self.unfilled[rank] = buffer[received:]
        return moved

    def events(self) -> tuple[dict[int, int], bool]:
        """Return the events to wait for, and whether another group's data is in the way of some of them."""
        events: dict[int, int] = {}
        is_busy = False
        for rank in self.unsent.keys() | self.unfilled.keys():
            peer = self._links.connected(rank)
            if peer is None or peer.lost_reason:
                is_busy = is_busy or (peer is None and rank < self._links.rank)
                continue
            reads = rank in self.unfilled and peer.next_data in (None, self._group)
            writes = rank in self._begun and rank in self.unsent
            is_busy = is_busy or (rank in self.unfilled and not reads) or (rank in self.unsent and not writes)
            if reads or writes:
                events[peer.connection.fileno()] = (READABLE if reads else 0) | (WRITABLE if writes else 0)
        return events, is_busy

    def awaits_connection(self) -> bool:
        """Return whether a higher rank has not connected yet."""
        return any(rank > self._links.rank for rank in self.unsent.keys() | self.unfilled.keys())

    def abandon(self) -> None:
        """Send zeros for the rest of data that was announced."""
        for rank in self._begun.intersection(self.unsent):
            self._links.peer(rank).abandon_data(len(self.unsent[rank]))


def _greeting(connection: socket.socket) -> int | None:
    """Return the rank of the process that has connected; None if it does not send one in time."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        received = connection.recv(_GREETING.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_GREETING.unpack(received)[0]) if len(received) == _GREETING.size else None


def _abandon_all() -> None:
    """Close the connections in a forked child: only the end of the rank itself may end them."""
    for links in list(_open_links):
        links.close()


os.register_at_fork(after_in_child=_abandon_all)
