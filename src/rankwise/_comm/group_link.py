"""The access of a group to the connections of its session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager

from rankwise._comm.control.channel import Channel, try_lock
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Call, Frame
from rankwise._comm.control.verdict import Combine, Verdict
from rankwise._comm.registry import GROUPS_OF_MEMBERS, PAIRS, GroupRegistry
from rankwise.errors import CollectiveError, NotJoinedError


class GroupLink:
    """A group's access to the connections of its session, which are made when the first group needs them.

    Attributes:
        group: The id of the group.
        ranks: The global ranks of the members.
    """

    def __init__(self, registry: GroupRegistry, group: int, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = ranks
        self._registry = registry
        self._channel: Channel | None = None
        self._is_closed = False

    @classmethod
    def of_ranks(cls, registry: GroupRegistry, ranks: Sequence[int]) -> GroupLink:
        """Return the access of a new group; all ranks make all groups, in the same order."""
        link = cls(registry, registry.num_groups, ranks)
        registry.num_groups += 1
        # Opened before its first collective: another group may have to notify it of a deadlock before that.
        if registry.is_connected and registry.rank in ranks and len(ranks) > 1:
            link.open()
        return link

    @classmethod
    def of_pair(cls, registry: GroupRegistry, group: GroupLink, members: Sequence[int]) -> GroupLink:
        """Return the access of two members of a group to the connection between them. Local.

        Args:
            registry: The groups of the session.
            group: The access of their group.
            members: The group ranks of the sender and the receiver.

        Raises:
            CollectiveError: The ranks of the session are not connected.
        """
        if not registry.is_connected:
            raise CollectiveError(
                "the ranks are not connected: call a collective of all ranks first, such as rankwise.barrier(); and "
                "two ranks of a group of more than 64 ranks on several hosts cannot communicate alone"
            )
        number = PAIRS + ((group.group << 32) | (members[0] << 16) | members[1])
        link = cls(registry, number, tuple(group.ranks[member] for member in members))
        link.open()
        return link

    @classmethod
    def of_members(cls, registry: GroupRegistry, ranks: Sequence[int], number: int) -> GroupLink:
        """Return the access of a group that its members make alone, with a number of its own. Local."""
        link = cls(registry, GROUPS_OF_MEMBERS + number, ranks)
        link.open()
        return link

    @property
    def same_host(self) -> bool:
        """All members are known to be on this host."""
        return self._channel is not None and self._channel.same_host

    def open(self) -> Channel:
        """Open the channel if it is not open.

        Local, but Collective over the session for its first group.

        Raises:
            CollectiveError: The ranks could not be reached, or did not come in time.
            NotJoinedError: The group is closed.
        """
        if self._channel is None:
            if self._is_closed:
                raise NotJoinedError("this group cannot be used any more: it was closed")
            self._channel = self._registry.open_channel(self.group, self.ranks)
        return self._channel

    def agree(
        self, call: Call, message: bytes, combine: Combine | None, read: Collection[int], timeout: float | None
    ) -> Verdict:
        """Exchange frames with the other members; see `Channel.agree`."""
        channel = self._channel or self.open()
        suspects: set[int] = set()
        verdict = channel.agree(
            call,
            message,
            combine=combine,
            read=read,
            timeout=self._registry.timeout if timeout is None else timeout,
            on_pause=lambda late: self._registry.detect_cross_group_deadlock(channel, call.text, late, suspects),
        )
        for waiting in verdict.waiting:
            self._registry.notify_other_group(channel, call.text, waiting)
        return verdict

    def post(self, frame: Frame) -> None:
        """Take part in the next exchange with a frame, without waiting for the frames of the others."""
        channel = self.open()
        with channel.held():
            channel.post(frame, timeout=self._registry.timeout)

    @property
    def sequence(self) -> int:
        """The number of the last exchange of the group that this rank has entered; 0 before the first."""
        return 0 if self._channel is None else self._channel.sequence

    @property
    def shared_page(self) -> PageChannel | None:
        """The channel through the page of the host, if it is open, and the members use that page for tensors too."""
        channel = self._channel
        return channel if isinstance(channel, PageChannel) and channel.page.shares_tensors else None

    @property
    def hosts(self) -> list[str]:
        """The ids of the members' hosts, by group rank; [] if all are on one host, or the channel is not open yet."""
        if self._channel is None or self.same_host:
            return []
        links = self._registry.connect()
        return [links.host(rank) for rank in self.ranks]

    def meetings(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the lock of the channel in a block, which gives a function that waits until all members have called it.

        The members have agreed on a call, and have used `shared_page` to prepare it; see `PageChannel.meetings`.
        """
        channel = self.shared_page
        if channel is None:
            raise NotJoinedError("this group cannot be used any more: it was closed")
        return channel.meetings(self._registry.timeout)

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:
        """Return the dead members, of `ranks` or of all, with reasons; "" if none is known. Does not wait."""
        with try_lock(self._channel) as channel:
            return "" if channel is None else channel.dead_ranks(ranks)

    def pending_call_from(self, rank: int) -> bool:
        """Return whether a rank has made a call in this group that this rank has not made. Does not wait."""
        with try_lock(self._channel) as channel:
            return channel is not None and channel.pending_call(rank) is not None

    def transfer(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]) -> None:
        """Send data to members and fill buffers with theirs, by group rank; both sides know the lengths."""
        self.open().transfer(outgoing, incoming, timeout=self._registry.timeout)

    def close(self, reason: str) -> None:
        """Send the other members the reason why this rank leaves."""
        self._is_closed = True
        self._channel = None
        self._registry.close_channel(self.group, reason)

    def shutdown(self, reason: str) -> None:
        """Leave, and release the connections if this is the group of all ranks of a session."""
        self.close(reason)
        if self.group == 0:
            self._registry.close(reason)
