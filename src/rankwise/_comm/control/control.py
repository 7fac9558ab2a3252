"""The control plane of a group: its members, and the exchanges by which they agree on a call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch

from rankwise._comm.control.channel import Channel, try_lock
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Description, FrameKind, UnverifiedCalls
from rankwise._comm.control.registry import GROUPS_OF_MEMBERS, PAIRS, GroupRegistry
from rankwise._comm.control.turns import Turns
from rankwise._comm.control.verdict import Combine, Verdict, combined
from rankwise.errors import CollectiveError, InvalidArgumentError, NotJoinedError, RemoteRankError


class Control:
    """The members of a group, and their exchanges. The connections are made when the first group needs them.

    Attributes:
        ranks: The global ranks of the members. Their order is the order of gathered results.
        size: The number of members.
        rank: The group rank of this process; None if it is not a member.
        group: The id of the group; -1 without a session.
        checks_tensors: Calls whose only value is a tensor on an accelerator are verified, as all others are.
        unverified: Those calls of the group that were not.
        is_connected: The members are connected, or need not be.
        closed: The group is closed, alone or with its session.
        closed_before_session: The group was closed alone, before its session.
        turns: Which call of the group is next on this rank.
        pid: The process that has made the group.
        broken_reason: Why the group cannot be used any more; "" if it can.
    """

    def __init__(
        self, ranks: Sequence[int], global_rank: int, registry: GroupRegistry | None = None, group: int = -1
    ) -> None:
        """Make the control plane of a group.

        Args:
            ranks: The global ranks of the members.
            global_rank: The global rank of this process.
            registry: The groups of the session, with its connections; None for a process alone.
            group: The id of the group.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(global_rank) if global_rank in ranks else None
        self.group = group
        self.is_connected = self.size == 1 or self.rank is None
        self.checks_tensors = registry is None or registry.check
        self.unverified = UnverifiedCalls()
        self.closed = False
        self.closed_before_session = False
        self.broken_reason = ""
        self.turns = Turns(ranks, global_rank, None if registry is None else registry.timeout)
        self.pid = os.getpid()
        self._registry = registry
        self._channel: Channel | None = None

    @classmethod
    def of_ranks(cls, registry: GroupRegistry, ranks: Sequence[int]) -> Control:
        """Return that of a new group; all ranks make all groups, in the same order."""
        control = cls(ranks, registry.rank, registry, registry.num_groups)
        registry.num_groups += 1
        # Opened before its first collective: another group may have to notify it of a deadlock before that.
        if registry.is_connected and control.rank is not None and len(ranks) > 1:
            control.open()
        return control

    @classmethod
    def of_pair(cls, registry: GroupRegistry, group: Control, members: Sequence[int]) -> Control:
        """Return that of two members of a group, given their group ranks, the sender's first. Local.

        Raises:
            CollectiveError: The ranks of the session are not connected.
        """
        if not registry.is_connected:
            raise CollectiveError(
                "the ranks are not connected: call a collective of all ranks first, such as rankwise.barrier()"
            )
        number = PAIRS + ((group.group << 32) | (members[0] << 16) | members[1])
        control = cls(tuple(group.ranks[member] for member in members), registry.rank, registry, number)
        control.open()
        return control

    @classmethod
    def of_members(cls, registry: GroupRegistry, ranks: Sequence[int], number: int) -> Control:
        """Return that of a group that its members make alone, with a number of its own. Local."""
        control = cls(ranks, registry.rank, registry, GROUPS_OF_MEMBERS + number)
        control.open()
        return control

    def connect(self) -> None:
        """Connect to the other members, before the first operation chooses its data plane.

        Otherwise it would take another one than all later operations, and its results would have other bits.
        """
        self.open()
        self.is_connected = True

    def open(self) -> Channel:
        """Open the channel if it is not open.

        Local, but Collective over the session for its first group.

        Raises:
            CollectiveError: The ranks could not be reached, or did not come in time.
            NotJoinedError: The group is closed.
        """
        if self._channel is None:
            if self.closed or self.broken_reason or self._registry is None:
                raise NotJoinedError("this group cannot be used any more: it was closed")
            self._channel = self._registry.open_channel(self.group, self.ranks)
        return self._channel

    def require_member(self) -> int:
        """Return the group rank of this process.

        Raises:
            NotJoinedError: The session of the group is closed, or belongs to another process.
            InvalidArgumentError: This process is not a member, or the group is closed.
        """
        if self.pid != os.getpid() and self.rank is not None:
            raise NotJoinedError.forked(self.ranks[self.rank])
        if self.closed_before_session:
            raise InvalidArgumentError("this group is closed; make another, with rankwise.new_group(ranks)")
        if self.closed:
            raise NotJoinedError("the session of this group is closed; call rankwise.init(), and make the group anew")
        if self.rank is None:
            raise InvalidArgumentError(
                f"this rank is not a member of the group of ranks {list(self.ranks)}; only members call its "
                "collectives: if group.rank is not None"
            )
        return self.rank

    def agree(
        self, call: Description, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> Verdict:
        """Exchange frames with the other members, as `Call.agree` describes it."""
        registry = self._registry
        if self.size == 1 or registry is None:
            verdict = combined([message], combine)
            verdict.bodies = {0: message}
            return verdict
        channel = self._channel or self.open()
        suspects: set[int] = set()
        verdict = channel.agree(
            call,
            message,
            combine=combine,
            read=read,
            timeout=registry.timeout if timeout is None else timeout,
            on_pause=lambda late: registry.detect_cross_group_deadlock(channel, call.text, late, suspects),
        )
        for waiting in verdict.waiting:
            registry.notify_other_group(channel, call.text, waiting)
        return verdict

    def add_unverified(self, call: Description) -> None:
        """Add a call that is not verified, and let the members on this host know their number. Does not wait."""
        self.unverified.add(call)
        if self._channel is not None:
            self._channel.set_unverified(self.unverified.total)

    def report(self, call: Description, failure: RemoteRankError) -> None:
        """Send the failure of this rank in place of its call, without waiting for the others."""
        channel = self.open()
        with channel.held():
            channel.post(call.frame(FrameKind.FAILED, pickle.dumps(failure)), timeout=self._session.timeout)

    def leave_for_good(self, reason: str) -> None:
        """Leave the group: the next step of this rank is no longer the next step of the others."""
        self.broken_reason = self.broken_reason or reason
        self._close_channel(reason)

    @property
    def sequence(self) -> int:
        """The number of the last exchange of the group that this rank has entered; 0 before the first."""
        return 0 if self._channel is None else self._channel.sequence

    @property
    def same_host(self) -> bool:
        """All members are known to be on this host."""
        return self._channel is not None and self._channel.same_host

    @property
    def shared_page(self) -> PageChannel | None:
        """The channel through the page of the host, if it is open, and the members use that page for tensors too."""
        channel = self._channel
        is_open = isinstance(channel, PageChannel) and channel.same_host and channel.page.shares_tensors
        return cast(PageChannel, channel) if is_open else None

    @property
    def hosts(self) -> list[str]:
        """The ids of the members' hosts, by group rank; [] if all are on one host, or the channel is not open yet."""
        if self._channel is None or self.same_host:
            return []
        links = self._session.connect()
        return [links.host(rank) for rank in self.ranks]

    def meetings(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the lock of the channel in a block, which gives a function that waits until all members have called it.

        The members have agreed on a call, and have used `shared_page` to prepare it; see `PageChannel.meetings`.
        """
        channel = self.shared_page
        if channel is None:
            raise NotJoinedError("this group cannot be used any more: it was closed")
        return channel.meetings(self._session.timeout)

    def transfer(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """Prepare to send tensors to members and to fill others with theirs; see `Channel.transfer`."""
        return self.open().transfer(outgoing, incoming, timeout=self._session.timeout)

    def dead_ranks(self, ranks: Container[int] | None = None, *, failed: bool = False) -> str:
        """Return the dead members, of `ranks` or of all, with reasons; "" if none is known. Does not wait.

        With `failed`, those that have left the session in order are left out.
        """
        with try_lock(self._channel) as channel:
            return "" if channel is None else channel.dead_ranks(ranks, failed=failed)

    def pending_call_from(self, rank: int) -> bool:
        """Return whether a rank has made a call in this group that this rank has not made. Does not wait."""
        with try_lock(self._channel) as channel:
            return channel is not None and bool(channel.pending_calls([rank]))

    def close(self, reason: str) -> None:
        """Send the other members the reason why this rank leaves; close the session's connections with its group."""
        self.closed = True
        self._close_channel(reason)
        if self.group == 0 and self._registry is not None:
            self._registry.close(reason)

    @property
    def _session(self) -> GroupRegistry:
        """The groups of the session; there is one where there is another member."""
        return cast(GroupRegistry, self._registry)

    def _close_channel(self, reason: str) -> None:
        self._channel = None
        if self._registry is not None:
            self._registry.close_channel(self.group, reason)
