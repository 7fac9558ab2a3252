"""Comm: a group of ranks, the groups made from it, and its end. Its operations on tensors: `tensor_operations`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch.distributed import Store

from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import FrameExchange
from rankwise._comm.data.plane import DataPlane
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.tensor_operations import TensorOperations
from rankwise._comm.work import Work
from rankwise._comm.work_queue import WorkQueue
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._user_frames import call_site
from rankwise.errors import CollectiveError, InvalidArgumentError

T = TypeVar("T")

# The largest data that is sent in the body of a frame, without a data operation.
INLINE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The functions of a session that a group of it needs.

    Attributes:
        open_group: Returns a group of some of the members; Collective over all members.
        reserve_group: Prepares this rank for a group of some of the members, so that opening it cannot fail here; False
            if that takes other members too. Local.
        open_pair: Returns the group of two members in which the first one sends to the second, given their group ranks;
            Local. None if there is no other member.
        open_of_members: Returns a group that only its members make, given their global ranks and a number that no other
            such group has; Local. None if groups are made by all members.
        hosts: Returns the ids of the members' hosts, by group rank; [] if all are on one host, or not connected yet.
        uses_shared_memory: This rank may share memory with the others of its host.
        store: Returns the store that the members share; None if there is no other member.
        destroy: Destroys the process group that was created for the group, if there is one.
        close_unreferenced: Closes the groups of the session to which nothing refers any more.
        timeout: Seconds that a collective waits for a rank; None without a limit.
    """

    open_group: Callable[[Sequence[int]], Comm]
    reserve_group: Callable[[Sequence[int]], bool] = lambda _: False
    open_pair: Callable[[Sequence[int]], Comm] | None = None
    open_of_members: Callable[[Sequence[int], int], Comm] | None = None
    hosts: Callable[[], Sequence[str]] = tuple
    uses_shared_memory: bool = False
    store: Callable[[], Store] | None = None
    destroy: Callable[[], None] = lambda: None
    close_unreferenced: Callable[[], None] = lambda: None
    timeout: float | None = None


class Comm(TensorOperations):
    """A group of ranks, in an order, that can communicate.

    Users have it as a `Group`. Results are new tensors, detached from autograd.

    Attributes:
        device: The device of received tensors that were on another rank's accelerator.
        check: Single tensors on an accelerator are verified too.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        global_rank: int,
        device: torch.device,
        planes: Sequence[DataPlane],
        exchange: FrameExchange | None = None,
        context: GroupContext,
        check: bool = False,
    ) -> None:
        """Make the group of some ranks.

        Args:
            ranks: The global ranks of the members.
            global_rank: The global rank of this process.
            device: The device of received tensors that were on another rank's accelerator.
            planes: The data planes.
            exchange: The exchange of frames; None if the group does not use frames, or has one member.
            context: The functions of the session.
            check: Single tensors on an accelerator are verified too.
        """
        super().__init__(ranks=ranks, global_rank=global_rank, exchange=exchange, planes=planes)
        self.device = device
        self.check = check
        self._context = context
        self._pairs: dict[tuple[int, int], Comm] = {}
        self._pairs_lock = threading.RLock()  # a signal handler may send

    @property
    def hosts(self) -> Sequence[str]:
        """The ids of the members' hosts, by group rank; empty if all are on one host, or not connected yet."""
        return self._context.hosts()

    @property
    def uses_shared_memory(self) -> bool:
        """This rank may share memory with the others of its host. It may differ between the members."""
        return self._context.uses_shared_memory

    def shared_store(self) -> Store | None:
        """Return the store that the members share; None if there is no other member."""
        return None if self._context.store is None else self._context.store()

    def shutdown(self, reason: str) -> None:
        super().shutdown(reason)
        for plane in self.planes:
            plane.close()

    def close_locally(self, reason: str) -> None:
        self.finish_works(0)
        super().close_locally(reason)
        self._context.destroy()

    def new_group(self, ranks: Sequence[int]) -> Comm:
        """Return a new group of some of the members.

        Collective over all members of this group, which pass the same global ranks.
        """
        child = self._context.open_group(ranks)
        self.add_child(child)
        return child

    def reserve_group(self, ranks: Sequence[int]) -> bool:
        """Prepare this rank for `new_group`, so that it cannot fail here; False if that takes other members too. Local.

        Raises:
            CollectiveError: There is no memory for the group.
        """
        return self._context.reserve_group(ranks)

    def group_of_members(self, ranks: Sequence[int], number: int) -> Comm:
        """Return a new group of some of the members, that these make alone. Local.

        Args:
            ranks: Their global ranks, in ascending order, this one among them.
            number: A number that is the same on all of them, and that no other such group has.

        Raises:
            CollectiveError: The connections to them are lost.
        """
        if self._context.open_of_members is None:
            raise CollectiveError("this group has no connections of its own")
        child = self._context.open_of_members(ranks, number)
        self.add_child(child)
        return child

    def pair(self, src: int, dst: int) -> Comm:
        """Return the group in which a member sends to another one, made by the first call. Local.

        The two directions have groups of their own, so that no call waits for one in the other direction. Both are made
        at once: a rank that waits in one of them then notices that the other rank waits in the other.

        Args:
            src: The group rank of the sender. It is the first member of the returned group.
            dst: The group rank of the receiver. One of the two is this rank.

        Raises:
            InvalidArgumentError: They are the same.
            CollectiveError: The ranks of the session are not connected yet.
        """
        self.require_member()
        if src == dst or self._context.open_pair is None:
            raise InvalidArgumentError(f"rank {self.ranks[src]} cannot send to itself, or receive from itself")
        with self._pairs_lock:
            for direction in ((src, dst), (dst, src)):
                if direction not in self._pairs:
                    self._pairs[direction] = self._context.open_pair(direction)
                    self.add_child(self._pairs[direction])
            return self._pairs[src, dst]

    def close(self) -> None:
        """Close a group that users have made, as `Group.close` describes.

        Collective over the members; Local on other ranks, and in a closed group.
        """
        if self.closed or self.pid != os.getpid():
            return
        call = Call("close")
        try:
            if self.rank is not None and not self.broken_reason:
                with self.collective(call) as own:
                    pairs = [json.loads(one) for one in self.all_gather_bytes(call, self._partners())]
                # A member that has not used a pair leaves it too, so that no call of the other one waits for it.
                for other in [member for member, partners in enumerate(pairs) if own in partners]:
                    self.pair(own, other)
                self.finish_works(self._context.timeout)  # those of pairs, which are not in the order of this group
        except CollectiveError:
            if self.dead_ranks():  # the members will never agree
                self.close_locally("closed the group")
            raise
        self.close_locally("closed the group")

    def _partners(self) -> bytes:
        """Return the group ranks of the members with which this one has pairs, as JSON."""
        return json.dumps([dst for src, dst in self._pairs if src == self.rank]).encode()

    def leave(self, error: BaseException) -> None:
        """Close a group without waiting for the other members, after an error of this rank."""
        if not self.closed and self.pid == os.getpid():
            self.close_locally(f"left the group with {type(error).__name__}")

    def start(
        self, call: Call, run: Callable[[], T], *, at_once: bool = False, convert: Callable[[T], T] | None = None
    ) -> Work[T]:
        """Make a call after those that are pending, without waiting for it.

        Args:
            call: The call.
            run: Makes it.
            at_once: In this thread, and now.
            convert: Otherwise: converts the result in the thread that takes it.

        Raises:
            NotJoinedError: The session of the group is closed.
            InvalidArgumentError: This rank is not a member, or the group is closed.
            CollectiveError: This rank is in another collective of the group.
            RuntimeError: No thread can be started, and no call is pending.
        """
        group_rank = self.require_member()
        self.guard.check_start(call)
        if self.guard.works is None:
            name = f"rankwise: a group of {self.size} ranks"
            self.guard.works = WorkQueue(name, self.ranks[group_rank], self._context.timeout)
        if at_once:
            return self.guard.works.run(call.operation, call_site(), run)
        return self.guard.works.start(call.operation, call_site(), run, convert)

    def finish_works(self, seconds: float | None) -> None:
        """Wait at most so long for the non-blocking calls of this group and those made from it, and end the rest."""
        start = time.monotonic()
        for child in list(self._children):
            if isinstance(child, Comm):
                child.finish_works(seconds)
            seconds = None if seconds is None else max(0, seconds - elapsed_since(start))
        if self.guard.works is not None:
            self.guard.works.finish(seconds)

    def close_children(self, reason: str) -> None:
        """Close the groups that were made from this one, without waiting for other members."""
        for child in list(self._children):
            child.close_locally(reason)
        self._context.close_unreferenced()

    def group_rank_of(self, rank: int | GroupRank, name: str) -> int:
        """Return the group rank of a member, which users pass as a global rank or as a `GroupRank`.

        Raises:
            InvalidArgumentError: There is no such member, or `rank` is of another type; `name` is the argument's name.
        """
        if not isinstance(rank, GroupRank):
            return super().group_rank_of(rank, name)
        if rank.index < self.size:
            return rank.index
        raise InvalidArgumentError(
            f"{name}={rank} is not a member: the group has {self.size} ranks, the last is GroupRank({self.size - 1})"
        )
