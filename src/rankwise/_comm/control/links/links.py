"""The connections of a session: to each other rank at most one for frames, which all groups share, and those for data.

There are none where all ranks are on one host, and share its memory for frames and for tensors. Others are made when
they are first needed.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.board import SESSION, Board
from rankwise._comm.control.links.connector import FRAMES, Connector
from rankwise._comm.control.links.peer import Peer
from rankwise._comm.control.links.places import Units
from rankwise._comm.control.links.witness import Witness
from rankwise._comm.control.ongoing_calls import OngoingCall, OngoingCalls, Recorder
from rankwise._comm.control.page.host_page import HostPage
from rankwise._net.job_secret import JobSecret
from rankwise._net.polling import SharedEventLoop
from rankwise._rank_files import WaitNote
from rankwise._text import ranks_text

_NO_INTEREST: Final = (False, False)
_HOSTS_NAMED: Final = 4

_open_links: weakref.WeakSet[Links] = weakref.WeakSet()
_kept_in_child: list[Links] = []


class Links:
    """The connections of this rank.

    Attributes:
        rank: The global rank of this process.
        loop: The event loop of the session.
        connector: Makes the connections, and keeps those for data.
        page: The page of this host; None if ranks agree over connections.
        units: The units of the session.
        channels: The open channels of the groups of which this rank is a member, by the id of the group.
        recorder: Records the calls of this rank; None if nobody has asked for that.
        board: What ranks tell those of other units without their help.
        wait_note: The collective that this rank waits in, for other processes.
        closed: This rank has closed its connections, or is about to, once no thread is in an exchange any more.
    """

    def __init__(
        self,
        rank: int,
        *,
        units: Units,
        page: HostPage | None,
        store: Store,
        secret: JobSecret | None,
        own_address: Callable[[], str],
    ) -> None:
        """Take over a page, and make no connections yet.

        Args:
            rank: The global rank of this process.
            units: The units of the session, and the hosts of its ranks.
            page: The page of this host, or None.
            store: The store that the ranks share, under a prefix of this session.
            secret: The secret of the job, which ranks of several hosts prove to know; None without one.
            own_address: Returns the name or address of this host for other hosts.

        Raises:
            OSError: Too few descriptors are left.
        """
        self.rank = rank
        self.loop = SharedEventLoop()
        self.page = page
        self.units = units
        self.channels: dict[int, OngoingCalls] = {}
        self.recorder: Recorder | None = None
        self.closed = self._freed = False
        self.board = Board(store, on_news=self.loop.interrupt)
        self.wait_note = WaitNote()
        self._num_channels = 0
        self._count_lock = threading.Lock()
        self._places = units.places
        self._peers: dict[int, Peer] = {}
        # The interest of the event loop in each peer: whether it reads, and writes. Threads of two groups update it.
        self._interest: dict[int, tuple[bool, bool]] = {}
        self._interest_lock = threading.RLock()
        self.connector = Connector(
            self.loop,
            store=store,
            rank=rank,
            key="address",
            secret=None if self.same_host else secret,
            places=self._places,
            own_address=own_address,
            on_made=self._take,
            on_failure=self._mark_unreachable,
        )
        self._witness: Witness | None = None
        if page is not None:
            page.register(self.loop)
        _open_links.add(self)

    @property
    def same_host(self) -> bool:
        """All ranks are on this host."""
        return self._places.num_hosts == 1

    def host(self, rank: int) -> str:
        """Return the id of the host of a rank; "" if all ranks are on this host."""
        return "" if self.same_host else str(self._places.host(rank))

    def host_name(self, rank: int) -> str:
        """Return the name of the host of a rank; "" if all ranks are on this host."""
        return self._places.host_name(rank)

    def unit_of(self, rank: int) -> int:
        """Return the number of the unit of a rank."""
        return self.units.of(rank)

    def listen(self) -> None:
        """Let higher ranks connect to this one. Local; does not wait, and does nothing if they can already.

        Raises:
            CollectiveError: No file descriptors are left.
        """
        self.connector.listen()

    def peer(self, rank: int) -> Peer:
        """Return the frames of a rank; the first call begins to connect to it, or to listen for it. Does not wait."""
        peer = self._peer(rank)
        if not peer.is_connected and not peer.lost_reason:
            self.connector.request(rank, FRAMES)
        return peer

    def update_interest(self, peer: Peer) -> None:
        """Make the event loop wait for what arrives from a peer, and for what can be sent to it, now."""
        with self._interest_lock:
            reads, writes = wanted = peer.is_readable, peer.is_connected and bool(peer.num_unsent)
            if wanted == self._interest.get(peer.rank, _NO_INTEREST):
                return
            self._interest[peer.rank] = wanted
            if peer.connection is None:
                return
            if wanted == _NO_INTEREST:
                self.loop.unregister(peer.connection)
            else:
                self.loop.register(
                    peer.connection, partial(self.receive, peer) if reads else None, peer.flush if writes else None
                )

    def wait(self, peers: Iterable[Peer], seen: int, seconds: float) -> bool:
        """Wait until something is sent to peers or received from any, as `SharedEventLoop.wait` describes it."""
        for peer in peers:
            self.update_interest(peer)
        return self.connector.wait(seen, seconds)

    def receive(self, peer: Peer) -> None:
        """Read what has arrived from a peer."""
        peer.receive()
        self.update_interest(peer)

    def name(self, rank: int) -> str:
        """Return a rank and its host: "rank 3 on node2"."""
        host = self.host_name(rank)
        return f"rank {rank}{f' on {host}' if host else ''}"

    def names(self, ranks: Sequence[int]) -> str:
        """Return "rank 3 on node2", or "each of ranks 0-15 on node1, node2"; of many hosts the first and the number."""
        if len(ranks) == 1:
            return self.name(ranks[0])
        hosts = list(dict.fromkeys(filter(None, map(self.host_name, ranks))))
        more = f" and {len(hosts) - _HOSTS_NAMED} more hosts" if len(hosts) > _HOSTS_NAMED else ""
        where = f" on {', '.join(hosts[:_HOSTS_NAMED])}{more}" if hosts else ""
        return f"each of {ranks_text(ranks)}{where}"

    def lost_reason(self, rank: int) -> str:
        """Return why the connection to a rank sends nothing more; "" if it does, or if there is none."""
        peer = self._peers.get(rank)
        return "" if peer is None else peer.lost_reason

    def ongoing_calls(self, rank: int) -> list[OngoingCall]:
        """Return the calls that a rank is in, as far as is known. Does not wait, and any thread may ask.

        One for each of its threads, of the groups that this rank is a member of too. A rank that moves data of a large
        tensor has ended the call.
        """
        is_dead = self.page is not None and self.page.is_dead(rank)
        if is_dead or self.board.gone(rank, SESSION) or self.lost_reason(rank):
            return []
        calls = (channel.ongoing_call(rank) for channel in list(self.channels.values()))
        return [call for call in calls if call is not None]

    def open_channel(self, group: int, channel: OngoingCalls) -> None:
        """Register the channel of a group that this rank is a member of."""
        self.channels[group] = channel
        with self._count_lock:
            self._num_channels += 1

    def leave_group(self, group: int) -> None:
        """Discard what other ranks have sent to a group that this rank has left, or still send."""
        for peer in list(self._peers.values()):
            peer.forget(group)
        self.connector.forget(group)

    def close_channel(self) -> None:
        """Unregister a channel that no thread uses any more; the last one closes connections that are to be closed."""
        with self._count_lock:
            self._num_channels -= 1
            is_last = self.closed and not self._num_channels
        if is_last:
            self._free()

    def watch(self, neighbours: Iterable[Peer]) -> None:
        """Let a thread watch the ranks of this unit, which this one leads, and connected neighbours in the tree."""
        processes = {} if self.page is None else self.page.processes
        connections = {peer.rank: peer.connection for peer in neighbours if peer.connection is not None}
        self._witness = Witness(self.board, processes, connections)

    def leave(self, reason: str) -> None:
        """Let the ranks of other units know that this one leaves the session."""
        if len(self.units) > 1:
            self.board.mark_gone(self.rank, reason)
            self.board.has_left = True

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
        if self._witness is not None:
            self._witness.close()
        self.board.close()
        self.loop.close()
        self.connector.close()
        for peer in self._peers.values():
            peer.mark_lost("was left by this rank")
            if peer.connection is not None:
                peer.connection.close()
        self.wait_note.close()
        if self.page is not None:
            self.page.close()

    def _peer(self, rank: int) -> Peer:
        found = self._peers.get(rank)
        if found is None:
            found = self._peers.setdefault(rank, Peer(rank, self.host_name(rank), on_read=self.loop.interrupt))
        return found

    def _take(self, rank: int, purpose: int, connection: socket.socket) -> bool:
        """Take a connection that was made; return whether this rank wants it."""
        if rank not in self._places.ranks:
            return False
        if purpose in self.channels:
            self.connector.keep(rank, purpose, connection)
            return True
        peer = self._peer(rank)
        if purpose != FRAMES or peer.is_connected or peer.lost_reason:
            return False
        peer.attach(connection)
        self.update_interest(peer)
        return True

    def _mark_unreachable(self) -> None:
        for peer in list(self._peers.values()):
            if not peer.is_connected and (why := self.connector.failure(peer.rank, FRAMES)):
                peer.mark_lost(why)


def _abandon_all() -> None:
    """Close the connections in a forked child: only the end of the rank itself may end them.

    The links are kept: their store, once freed, would wait for a thread that only the parent has. The parent may have
    dropped them, with the process group of other code that it has adopted, and not collected them yet.
    """
    _kept_in_child.extend(_open_links)
    for links in _kept_in_child:
        links.abandon()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_abandon_all)
