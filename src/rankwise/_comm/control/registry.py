"""The registry of a session's groups: how they connect, are closed, and find deadlocks between each other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import torch
import torch.distributed as dist

from rankwise._comm.control.channel import Channel, try_lock, within_a_moment
from rankwise._comm.control.hosts_channel import HostsChannel
from rankwise._comm.control.links.connect import HostConnections, connect
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.ongoing_calls import Recorder
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Frame, FrameKind, WaitingInOtherGroup
from rankwise._comm.control.socket_channel import SocketChannel
from rankwise._comm.control.turns import is_program_of_rank
from rankwise._comm.gloo_threads import await_idle_threads
from rankwise._net.host import interface_towards_others, loopback_interface
from rankwise._net.job_secret import JobSecret
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import CollectiveError, RankwiseError

# The ids of groups of two ranks that communicate alone begin here, beyond those of other groups.
PAIRS: Final = 1 << 62
# The ids of groups that their members make alone begin here, in the order of a counter in the store.
GROUPS_OF_MEMBERS: Final = 1 << 29


@dataclass(kw_only=True)
class GroupRegistry:
    """The groups of one session, and their common settings.

    Attributes:
        rank: The global rank of this process.
        device: The device of received tensors that were on another rank's accelerator.
        timeout: Seconds that a collective waits for a rank.
        check: Single tensors on an accelerator are verified too.
        one_host: All ranks are known to be on this host, so their data need not leave it.
        shares_pages: Ranks of one host agree through a page of memory; threads of one process do not.
        shares_tensors: They may use that memory for tensors too.
        secret: The secret by which ranks of several hosts prove that they belong to this job; None without one.
        store: Returns the store that all ranks share.
        own_address: Returns the name or address of this host for other hosts.
        recorder: Records the calls of this rank; None if nobody has asked for that.
        on_hosts: Takes the connections for the processes that watch the hosts; None without a watch.
        find_dead_ranks: Returns the dead ranks among the given ones, with reasons, or ""; does not wait. For the time
            before the first group, which has connections of its own.
        backend: The backends of the session's process group, as torch writes them.
        num_groups: The number of groups made so far; all ranks make all groups, in the same order.
        ranks: The global ranks of the session.
        channels: The channels of all groups that this rank is a member of, by the id of the group.
        process_groups: The process groups that were created for groups, by the id of the group.
        unreferenced: The ids of groups without references that were not closed.
    """

    rank: int
    ranks: Sequence[int]
    device: torch.device
    timeout: float
    check: bool
    one_host: bool
    store: Callable[[], dist.Store]
    own_address: Callable[[], str]
    find_dead_ranks: Callable[[Sequence[int]], str] = lambda _: ""
    backend: str | None = None
    shares_pages: bool = True
    shares_tensors: bool = True
    secret: JobSecret | None = None
    recorder: Recorder | None = None
    on_hosts: Callable[[HostConnections], None] | None = None
    num_groups: int = 0
    channels: dict[int, Channel] = field(default_factory=dict)
    process_groups: dict[int, weakref.ref[dist.ProcessGroup]] = field(default_factory=dict)
    unreferenced: list[int] = field(default_factory=list)
    _links: Links | None = None

    @property
    def is_connected(self) -> bool:
        """The ranks of the session are connected."""
        return self._links is not None

    def open_channel(self, group: int, ranks: Sequence[int]) -> Channel:
        """Open the channel of a group.

        Collective over the members; the first call is Collective over the session, whose ranks it connects.
        """
        if group in self.channels:
            return self.channels[group]
        links = self.connect()
        page = links.page
        num_here = 1 if page is None else len(set(page.ranks).intersection(ranks))
        if page is not None and num_here == len(ranks):
            channel: Channel = PageChannel(group, ranks, links, page)
        elif page is not None and num_here > 1:
            channel = HostsChannel(group, ranks, links, page)
        else:
            channel = SocketChannel(group, ranks, links)
        self.channels[group] = channel
        return channel

    def reserve_channel(self, ranks: Sequence[int]) -> bool:
        """Prepare this rank for a new group, so that opening it cannot fail; False if that takes other ranks too.

        Raises:
            CollectiveError: There is no memory for the group.
        """
        links = self._links
        if links is None or not self.moves_data_itself():
            return False
        if links.page is not None and self.rank in ranks:
            links.page.reserve()
        return True

    def connect(self) -> Links:
        """Return the connections of the session; the first call makes them, and is Collective over its ranks.

        Raises:
            CollectiveError: The ranks could not be reached, or did not come in time.
        """
        if self._links is None:
            self._links = self._connect()
            self._links.recorder = self.recorder
        return self._links

    def _connect(self) -> Links:
        ranks = self.ranks

        def check_alive(awaited: Callable[[], Sequence[int]]) -> None:
            dead = self.find_dead_ranks(ranks) and self.find_dead_ranks(
                awaited()
            )  # `awaited` asks the store: only if needed
            if dead:
                raise CollectiveError(f"a group of {len(ranks)} ranks could not be made: {dead}")

        try:
            return connect(
                store=self.store(),
                ranks=ranks,
                rank=self.rank,
                one_host=self.one_host,
                shares_pages=self.shares_pages,
                shares_tensors=self.shares_tensors,
                own_address=self.own_address,
                secret=self.secret,
                timeout=self.timeout,
                check_alive=check_alive,
                on_hosts=self.on_hosts,
            )
        except RuntimeError as error:
            if isinstance(error, RankwiseError):
                raise
            raise CollectiveError(
                f"a group of {len(ranks)} ranks could not be made: the store of the ranks failed: {error}"
            ) from error

    @cached_property
    def gloo_interface(self) -> str:
        """The interface that gloo has to listen on; "" if its own choice is right. Looks up the name of this host."""
        return loopback_interface() if self.one_host else interface_towards_others(self.own_address())

    def dead_ranks(self) -> str:
        """Return the ranks of the session that have died or left, with reasons; "" if none is found within a moment."""

        def known() -> str:
            with try_lock(self.channels.get(0)) as channel:
                return "" if channel is None else channel.dead_ranks()

        return within_a_moment(known)

    def moves_data_itself(self) -> bool:
        """Return whether groups need no process group: tensors are on the CPU of this host, or on XLA devices."""
        return (self.one_host and self.device.type == "cpu") or self.device.type == DEVICE_TYPE

    def track_group(self, number: int, group: dist.ProcessGroup | None, user: object) -> None:
        """Register a group, to be closed after its user has no references, with the process group created for it."""
        if group is not None:
            self.process_groups[number] = weakref.ref(group)
        # The finalizer only records the id. Garbage collection may run in another collective or at interpreter exit,
        # and destroying a process group waits for its threads.
        weakref.finalize(user, self.unreferenced.append, number).atexit = False

    def destroy_process_group(self, number: int) -> None:
        """Destroy the process group that was created for a group, if there is one."""
        group = self.process_groups.pop(number, lambda: None)()
        if group is not None:
            await_idle_threads()
            with suppress(ValueError):  # other code has destroyed it, and still refers to it
                dist.destroy_process_group(group)

    def close_channel(self, group: int, reason: str) -> None:
        """Close the channel of a group, if it is open."""
        channel = self.channels.pop(group, None)
        if channel is not None:
            channel.close(reason)

    def close(self, reason: str) -> None:
        """Close the channels of all groups, and the connections."""
        links, self._links = self._links, None
        if links is not None:
            links.leave(reason)
        for group in list(self.channels):
            self.close_channel(group, reason)
        if links is not None:
            links.close()

    def close_unreferenced(self) -> None:
        """Close the groups that this rank cannot use any more because nothing refers to them."""
        while self.unreferenced:
            group = self.unreferenced.pop()
            self.close_channel(group, "has no reference to the group any more")
            self.destroy_process_group(group)

    def detect_cross_group_deadlock(
        self, channel: Channel, call: str, missing: Sequence[int], suspects: set[int]
    ) -> None:
        """Look for a deadlock: a rank that is missing in this group waits for this rank in another group.

        Called again and again while this rank waits here. If there is a deadlock, this rank posts a frame to the other
        group, so that its members raise; they in turn notify this group (`notify_other_group`).

        Args:
            channel: The channel of the group in which this rank waits.
            call: The text of its call there.
            missing: The ranks that have sent none.
            suspects: The groups in which such a rank was found at the last look; updated here.
        """
        # One look proves nothing: the rank may have finished here, with its frame still on the way, and gone on to the
        # other group. At the second look the frame would have arrived. And only calls of the ranks' programs count:
        # with a group for each thread, a rank may wait in several groups without a deadlock.
        wanted = set(missing)
        for other in list(self.channels.values()) if is_program_of_rank() else ():
            with try_lock(None if other is channel else other) as locked:
                if locked is None:
                    continue
                if not any(frame.main for frame in locked.pending_calls(wanted)):
                    suspects.discard(locked.group)
                elif locked.group in suspects:
                    locked.post(self._waiting_frame(channel, call))
                else:
                    suspects.add(locked.group)

    def notify_other_group(self, channel: Channel, call: str, waiting: WaitingInOtherGroup) -> None:
        """Post a frame to another group that waits for this rank, which was found in a deadlock in this group.

        Members of both groups must take part in the same number of exchanges, or the groups could not be used again.
        """
        if waiting.group >= PAIRS and self.rank in waiting.ranks:  # this rank may not have used it yet
            self.open_channel(waiting.group, waiting.ranks)
        with try_lock(self.channels.get(waiting.group)) as locked:
            # Only if this rank has not entered that exchange, or posted to it, before.
            if locked is not None and locked.sequence == waiting.sequence - 1:
                locked.post(self._waiting_frame(channel, call, cause=replace(waiting, cause=None)))

    def _waiting_frame(self, channel: Channel, call: str, cause: WaitingInOtherGroup | None = None) -> Frame:
        """Return the frame for another group, from this rank, which waits in a group."""
        waiting = WaitingInOtherGroup(self.rank, call, channel.group, channel.ranks, channel.sequence, cause)
        return Frame(FrameKind.WAITING_IN_OTHER_GROUP, call, body=pickle.dumps(waiting))
