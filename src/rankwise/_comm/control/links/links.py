"""The connections of a session, at most one to each other rank, which all groups share.

There are none where all ranks are on one host, and share its memory for frames and for tensors.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from rankwise._comm.control.links.peer import CLOSED, Peer
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.rank_state import OngoingCalls, RankState, Recorder
from rankwise._net.polling import SharedEventLoop
from rankwise._rank_files import WaitNote

_NO_INTEREST: Final = (False, False)

_open_links: weakref.WeakSet[Links] = weakref.WeakSet()


class Links:
    """The connections of this rank.

    Attributes:
        rank: The global rank of this process.
        loop: The event loop of the session.
        page: The page of this host; None if ranks agree over connections.
        channels: The open channels of the groups of which this rank is a member, by the id of the group.
        recorder: Records the calls of this rank; None if nobody has asked for that.
        wait_note: The collective that this rank waits in, for other processes.
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
        self.recorder: Recorder | None = None
        self.closed = self._freed = False
        self.wait_note = WaitNote()
        self._num_channels = 0
        self._count_lock = threading.Lock()
        self._hosts = hosts
        self._host_names = host_names
        self._peers: dict[int, Peer] = {}
        # The interest of the event loop in each peer: whether it reads, and writes. Threads of two groups update it.
        self._interest: dict[int, tuple[bool, bool]] = {}
        self._interest_lock = threading.RLock()
        for other, connection in connections.items():
            peer = Peer(
                other,
                self.host_name(other),
                connection,
                expects_data=self.channels.__contains__,
                on_read=self.loop.interrupt,
            )
            self._peers[other] = peer
            self.update_interest(peer)
        if page is not None:
            page.register(self.loop)
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

    def update_interest(self, peer: Peer) -> None:
        """Make the event loop wait for what arrives from a peer, and for what can be sent to it, now."""
        with self._interest_lock:
            reads, writes = wanted = peer.is_readable, bool(peer.num_unsent)
            if wanted == self._interest.get(peer.rank, _NO_INTEREST):
                return
            self._interest[peer.rank] = wanted
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
        return self.loop.wait(seen, seconds)

    def receive(self, peer: Peer) -> None:
        """Read what has arrived from a peer."""
        peer.receive()
        self.update_interest(peer)

    def name(self, rank: int) -> str:
        """Return a rank and its host: "rank 3 on node2"."""
        host = self.host_name(rank)
        return f"rank {rank}{f' on {host}' if host else ''}"

    def lost_reason(self, rank: int) -> str:
        """Return why the connection to a rank sends nothing more; "" if it does, or if there is none."""
        peer = self._peers.get(rank)
        return "" if peer is None else peer.lost_reason

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
        if self.page is not None:
            self.page.close()


def _abandon_all() -> None:
    """Close the connections in a forked child: only the end of the rank itself may end them."""
    for links in list(_open_links):
        links.abandon()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_abandon_all)
