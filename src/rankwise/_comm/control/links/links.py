"""The connections of a session, at most one to each other rank, which all groups share.

Where ranks agree through the page of their host, a connection between two of them is made when they first transfer
data: the one with the higher rank connects, to the socket that the other one has published in the page.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections.abc import Container, Mapping
from functools import partial
from typing import Final

from rankwise._comm.control.links.peer import CLOSED, Peer
from rankwise._comm.control.links.sockets import admit, listen_locally, local_name
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.rank_state import OngoingCalls, RankState
from rankwise._net.polling import SharedEventLoop
from rankwise._rank_files import WaitNote
from rankwise.errors import CollectiveError

_NO_INTEREST: Final = (False, False)
# The global rank of the process that connects.
_GREETING: Final = struct.Struct("<I")
# More connections than these without a rank: the first of them is no rank's.
_MAX_UNIDENTIFIED: Final = 256

_open_links: weakref.WeakSet[Links] = weakref.WeakSet()


class Links:
    """The connections of this rank.

    Attributes:
        rank: The global rank of this process.
        loop: The event loop of the session.
        page: The page of this host; None if ranks agree over connections.
        channels: The open channels of the groups of which this rank is a member, by the id of the group.
        wait_note: The collective that this rank waits in, for other processes.
        num_transfers: The number of transfers of data that threads of this rank are in.
        closed: This rank has closed its connections, or is about to, once no thread is in an exchange any more.
    """

    def __init__(
        self,
        rank: int,
        *,
        connections: Mapping[int, socket.socket],
        hosts: Mapping[int, str],
        host_names: Mapping[int, str],
        page: HostPage | None,
    ) -> None:
        """Take over connections and a page.

        Args:
            rank: The global rank of this process.
            connections: The connections to other ranks, by global rank.
            hosts, host_names: Ids and names of the hosts of the ranks, by global rank; empty if all are on this host.
            page: The page of this host, or None.

        Raises:
            OSError: Too few descriptors are left.
        """
        self.rank = rank
        self.loop = SharedEventLoop()
        self.page = page
        self.channels: dict[int, OngoingCalls] = {}
        self.closed = self._freed = False
        self.wait_note = WaitNote()
        self.num_transfers = 0
        self._num_channels = 0
        self._count_lock = threading.Lock()
        self._hosts = hosts
        self._host_names = host_names
        # Without other hosts, ranks with a page send each other no frames, and connect when they transfer data.
        self._connects_late = page is not None and not hosts
        self._connecting = threading.Lock()
        self._listener: socket.socket | None = None
        self._unidentified: list[socket.socket] = []  # accepted, but their greeting has not arrived
        self._peers: dict[int, Peer] = {}
        # The interest of the event loop in each peer: whether it reads, and writes. Threads of two groups update it.
        self._interest: dict[int, tuple[bool, bool]] = {}
        self._interest_lock = threading.RLock()
        for other, connection in connections.items():
            self._add(other, connection)
        if page is not None:
            page.register(self.loop)
            if not hosts:
                self._listener = listen_locally()
                self._listener.setblocking(False)
                page.publish_name(local_name(self._listener))
        _open_links.add(self)

    @property
    def same_host(self) -> bool:
        """All ranks are on this host."""
        return not self._hosts

    def host(self, rank: int) -> str:
        """Return the id of the host of a rank; "" if all ranks are on this host."""
        return self._hosts.get(rank, "")

    def host_name(self, rank: int) -> str:
        """Return the name of the host of a rank; "" if all ranks are on this host."""
        return self._host_names.get(rank, "")

    def peer(self, rank: int) -> Peer:
        """Return the connection to a rank."""
        return self._peers[rank]

    def existing(self, rank: int) -> Peer | None:
        """Return the connection to a rank; None if there is none yet."""
        return self._peers.get(rank)

    def update_interest(self, peer: Peer) -> None:
        """Make the event loop wait for what can be read from a peer, and sent to it, now."""
        with self._interest_lock:
            wanted = peer.is_readable, peer.is_writable
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

    def name(self, rank: int) -> str:
        """Return a rank and its host: "rank 3 on node2"."""
        host = self.host_name(rank)
        return f"rank {rank}{f' on {host}' if host else ''}"

    def connected(self, rank: int) -> Peer | None:
        """Return the connection to a rank; None while there is none yet. Does not wait."""
        if rank not in self._peers and self.page is not None:
            with self._connecting:
                if rank not in self._peers and rank < self.rank:
                    self._connect(self.page, rank)
                elif rank not in self._peers and self._listener is not None:
                    self._accept(self._listener)
        return self._peers.get(rank)

    @property
    def listener(self) -> int | None:
        """The descriptor of the socket to which higher ranks connect; None if all are connected from the start."""
        return None if self._listener is None else self._listener.fileno()

    @property
    def unidentified(self) -> list[int]:
        """The descriptors of connections whose rank is not known yet."""
        return [connection.fileno() for connection in self._unidentified]

    def lost_reason(self, rank: int) -> str:
        """Return why the connection to a rank sends nothing more; "" if it does, or if there is none yet."""
        peer = self._peers.get(rank)
        return "" if peer is None else peer.lost_reason

    def resume(self, ranks: Container[int]) -> None:
        """Read the frames that came together with data of these ranks, and let the event loop wait for others again."""
        for rank in list(self._interest):
            if rank in ranks:
                self.receive(self._peers[rank])

    def count_transfers(self, change: int) -> None:
        """Count a transfer that begins or ends."""
        with self._count_lock:
            self.num_transfers += change

    def state(self, rank: int) -> RankState:
        """Return the state of a rank, as far as is known; any thread may ask. Does not wait."""
        lost = CLOSED if self.page is not None and self.page.is_dead(rank) else self.lost_reason(rank)
        calls = (channel.ongoing_call(rank) for channel in list(self.channels.values()) if not lost)
        return RankState(rank, lost, [call for call in calls if call is not None])

    def open_channel(self, group: int, channel: OngoingCalls) -> None:
        """Register the channel of a group that this rank is a member of."""
        self.channels[group] = channel
        with self._count_lock:
            self._num_channels += 1

    def close_channel(self) -> None:
        """Unregister a channel that no thread uses any more; the last one closes connections that are to be closed."""
        with self._count_lock:
            self._num_channels -= 1
            is_last = self.closed and not self._num_channels
        if is_last:
            self._free()

    def close(self) -> None:
        """Close all connections, and the page, without frames: now, or when no thread is in an exchange any more."""
        with self._count_lock:
            was_closed, self.closed = self.closed, True
            is_unused = not self._num_channels
        if is_unused and not was_closed:
            self._free()

    def abandon(self) -> None:
        """Close all descriptors in a forked child, whose parent goes on to use the connections."""
        if not self._freed:
            self.closed = True
            self._free()

    def _free(self) -> None:
        self._freed = True
        _open_links.discard(self)
        for peer in self._peers.values():
            peer.mark_lost("was left by this rank")
            peer.connection.close()
        self.loop.close()
        self.wait_note.close()
        for connection in (*self._unidentified, *filter(None, [self._listener])):
            connection.close()
        if self.page is not None:
            self.page.close()

    def _add(self, rank: int, connection: socket.socket) -> None:
        name, expects_data = self.host_name(rank), self.channels.__contains__
        peer = Peer(rank, name, connection, expects_data=expects_data, on_read=self.loop.interrupt)
        self._peers[rank] = peer
        if not self._connects_late:
            self.update_interest(peer)

    def _connect(self, page: HostPage, rank: int) -> None:
        """Connect to a lower rank; do nothing if it accepts no connection now: it may have no room, or be gone."""
        try:
            connection = socket.socket(socket.AF_UNIX)
        except OSError as error:
            raise CollectiveError(f"rank {self.rank} cannot connect to {self.name(rank)}: {error}") from error
        try:
            connection.setblocking(False)
            connection.connect(f"\0{page.name(page.ranks.index(rank))}")
            if not admit(connection):
                raise PermissionError("it belongs to another user")
            connection.sendall(_GREETING.pack(self.rank))
        except (BlockingIOError, ConnectionError):
            connection.close()
        except OSError as error:
            connection.close()
            raise CollectiveError(f"{self.name(rank)} cannot be reached by rank {self.rank}: {error}") from error
        else:
            self._add(rank, connection)

    def _accept(self, listener: socket.socket) -> None:
        """Accept the connections of higher ranks that have arrived, as far as they have identified themselves."""
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                raise CollectiveError(f"rank {self.rank} cannot accept connections of other ranks: {error}") from error
            connection.setblocking(False)
            if admit(connection):
                self._unidentified.append(connection)
            else:
                connection.close()
        for connection in list(self._unidentified):
            rank = _greeting(connection)
            if rank is None:
                continue
            self._unidentified.remove(connection)
            if rank <= self.rank or rank in self._peers or self.page is None or rank not in self.page.ranks:
                connection.close()
            else:
                self._add(rank, connection)
        while len(self._unidentified) > _MAX_UNIDENTIFIED:
            self._unidentified.pop(0).close()


def _greeting(connection: socket.socket) -> int | None:
    """Return the rank of the process that has connected, -1 if it is none; None if it has not sent it yet."""
    try:
        received = connection.recv(_GREETING.size)
    except BlockingIOError:
        return None
    except OSError:
        return -1
    return int(_GREETING.unpack(received)[0]) if len(received) == _GREETING.size else -1


def _abandon_all() -> None:
    """Close the connections in a forked child: only the end of the rank itself may end them."""
    for links in list(_open_links):
        links.abandon()


os.register_at_fork(after_in_child=_abandon_all)
