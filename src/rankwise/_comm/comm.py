"""Comm: a group of ranks, the groups made from it, and its end. Users have it as a `Group`."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from rankwise._arguments import as_integer
from rankwise._comm.control.call import Call
from rankwise._comm.control.control import Control
from rankwise._comm.control.ongoing_calls import Recorder
from rankwise._comm.control.registry import PAIRS, GroupRegistry
from rankwise._comm.data.plane import DataPlane
from rankwise._comm.data.planes import Planes
from rankwise._comm.data.serial import SerialPlane
from rankwise._comm.data.shared_memory_plane import SharedMemoryPlane
from rankwise._comm.data.socket_plane import SocketPlane
from rankwise._comm.data.torch_backend import TorchPlane
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.work import Work
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._rendezvous.signed_store import part_of
from rankwise._torch import listening_on
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import CollectiveError, InvalidArgumentError, NotJoinedError, shown

T = TypeVar("T")

# The largest data that is sent in the body of a frame, without a data operation; and that of all members together where
# one of them reads all.
INLINE_BYTES: Final = 4096
_MOST_INLINE_BYTES_OF_ALL: Final = 1 << 20


class Comm:
    """A group of ranks, in an order, that can communicate: the members agree on a call, and then data moves.

    Attributes:
        ranks: The global ranks of the members. Their order is the order of gathered results.
        size: The number of members.
        rank: The group rank of this process; None if it is not a member.
        control: The members, and their agreement on calls.
        planes: The operations on tensors. Results are new tensors, detached from autograd.
        device: The device of received tensors that were on another rank's accelerator.
        check: Single tensors on an accelerator are verified too.
        most_inline_bytes: The largest data of one member that is reduced in the bodies of frames.
        num_exclusive_sections: The number of exclusive sections so far, in which one member ran and the others waited.
    """

    def __init__(
        self, control: Control, planes: Planes, *, device: torch.device, registry: GroupRegistry | None = None
    ) -> None:
        """Make a group.

        Args:
            control: Its control plane.
            planes: Its data planes.
            device: The device of received tensors that were on another rank's accelerator.
            registry: The groups of the session; None for a process alone.
        """
        self.ranks = control.ranks
        self.size = control.size
        self.rank = control.rank
        self.control = control
        self.planes = planes
        self.device = device
        self.most_inline_bytes = min(INLINE_BYTES, _MOST_INLINE_BYTES_OF_ALL // self.size)
        self.num_exclusive_sections = 0
        self._registry = registry
        self._children: weakref.WeakSet[Comm] = weakref.WeakSet()
        self._pairs: dict[tuple[int, int], Comm] = {}
        self._pairs_lock = threading.RLock()  # a signal handler may send

    def call(
        self, operation: str, settings: Mapping[str, object] | None = None, *, content: str = "", site: str = ""
    ) -> Call:
        """Return a collective, in whose block this rank takes part.

        Args:
            operation: The name of the public function.
            settings: The arguments that have to be the same on all members.
            content: The properties of the value that have to be the same, as a short text.
            site: The line of the user's program; "" for the one that calls the public function.
        """
        return Call(self.control, operation, settings, content=content, site=site)

    @property
    def closed(self) -> bool:
        """The group is closed, alone or with its session."""
        return self.control.closed

    @property
    def hosts(self) -> Sequence[str]:
        """The ids of the members' hosts, by group rank; empty if all are on one host, or not connected yet."""
        shares_pages = self._registry is not None and self._registry.shares_pages
        return self.control.hosts if shares_pages else ()

    @property
    def uses_shared_memory(self) -> bool:
        """This rank may share memory with the others of its host. It may differ between the members."""
        return self._registry is not None and self._registry.shares_tensors

    def shared_store(self) -> dist.Store | None:
        """Return the store that the members share; None if there is no other member."""
        if self._registry is None or self.size == 1:
            return None
        return part_of(self._registry.store(), f"group/{self.control.group}")

    def arrivals(self) -> list[tuple[Sequence[int], str, list[float]]]:
        """Return the last calls of all groups of the session: the members, the text, and when each member came.

        As `Channel.arrivals`. Ranks that send to each other alone wait for each other by intention, and are left out.
        """
        channels = [] if self._registry is None else list(self._registry.channels.values())
        return [
            (channel.ranks, call, times)
            for channel in channels
            if channel.group < PAIRS
            for call, times in channel.arrivals()
        ]

    def record_calls(self, recorder: Recorder | None) -> None:
        """Let the calls of all groups of the session be recorded; None ends that."""
        if self._registry is not None:
            self._registry.recorder = recorder
            if self._registry.is_connected:
                self._registry.connect().recorder = recorder

    def group_rank_of(self, rank: int | GroupRank, name: str) -> int:
        """Return the group rank of a member, which users pass as a global rank or as a `GroupRank`.

        Raises:
            InvalidArgumentError: There is no such member, or `rank` is of another type; `name` is the argument's name.
        """
        if isinstance(rank, GroupRank):
            if rank.index < self.size:
                return rank.index
            last = f"the group has {self.size} ranks, the last is GroupRank({self.size - 1})"
            raise InvalidArgumentError(f"{name}={rank} is not a member: {last}")
        number = as_integer(rank, name)
        if number in self.ranks:
            return self.ranks.index(number)
        members = f"ranks 0 to {self.size - 1}" if isinstance(self.ranks, range) else f"ranks {list(self.ranks)}"
        raise InvalidArgumentError(f"{name}={shown(number)} is not a member: the group has {members}")

    def new_group(self, ranks: Sequence[int]) -> Comm:
        """Return a new group of some of the members.

        Collective over all members of this group, which pass the same global ranks.
        """
        if self._registry is None:
            return self.add_child(serial_comm(self.device, tuple(ranks)))
        return self.add_child(_open_group(self._registry, ranks))

    def reserve_group(self, ranks: Sequence[int]) -> bool:
        """Prepare this rank for `new_group`, so that it cannot fail here; False if that takes other members too. Local.

        Raises:
            CollectiveError: There is no memory for the group.
        """
        return self._registry is not None and self._registry.reserve_channel(ranks)

    def group_of_members(self, ranks: Sequence[int], number: int) -> Comm:
        """Return a new group of some of the members, that these make alone. Local.

        Args:
            ranks: Their global ranks, in ascending order, this one among them.
            number: A number that is the same on all of them, and that no other such group has.

        Raises:
            CollectiveError: The connections to them are lost.
        """
        if self._registry is None:
            raise CollectiveError("this group has no connections of its own")
        return self.add_child(_open_connected(self._registry, Control.of_members(self._registry, ranks, number)))

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
        self.control.require_member()
        if src == dst or self._registry is None:
            raise InvalidArgumentError(f"rank {self.ranks[src]} cannot send to itself, or receive from itself")
        with self._pairs_lock:
            for direction in ((src, dst), (dst, src)):
                if direction not in self._pairs:
                    control = Control.of_pair(self._registry, self.control, direction)
                    self._pairs[direction] = self.add_child(_open_connected(self._registry, control))
            return self._pairs[src, dst]

    def add_child(self, child: Comm) -> Comm:
        """Register a group of some of these members, to be closed with this one if it still exists then."""
        self._children.add(child)
        child.control.turns.outer = self.control.turns
        return child

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
        self.control.require_member()
        return self.control.turns.start(call, run, at_once=at_once, convert=convert)

    def finish_works(self, seconds: float | None) -> None:
        """Wait at most so long for the non-blocking calls of this group and those made from it, and end the rest."""
        start = time.monotonic()
        for child in list(self._children):
            child.finish_works(seconds)
            seconds = None if seconds is None else max(0, seconds - elapsed_since(start))
        self.control.turns.finish(seconds)

    def close(self) -> None:
        """Close a group that users have made, as `Group.close` describes.

        Collective over the members; Local on other ranks, and in a closed group.
        """
        if self.closed or self.control.pid != os.getpid():
            return
        try:
            if self.rank is not None and not self.control.broken_reason:
                with self.call("close") as call:
                    pairs = [json.loads(one) for one in call.all_gather(self._partners())]
                # A member that has not used a pair leaves it too, so that no call of the other one waits for it.
                for other in [member for member, partners in enumerate(pairs) if self.rank in partners]:
                    self.pair(self.rank, other)
                self.finish_works(self._timeout)  # those of pairs, which are not in the order of this group
        except CollectiveError:
            if self.control.dead_ranks():  # the members will never agree
                self.close_locally("closed the group")
            raise
        self.close_locally("closed the group")

    def leave(self, error: BaseException) -> None:
        """Close a group without waiting for the other members, after an error of this rank."""
        if not self.closed and self.control.pid == os.getpid():
            self.close_locally(f"left the group with {type(error).__name__}")

    def close_locally(self, reason: str) -> None:
        """Shut down before the session ends, without waiting for other members, and destroy the group's resources."""
        self.finish_works(0)
        self.control.closed_before_session = True
        self.shutdown(reason)
        if self._registry is not None:
            self._registry.destroy_process_group(self.control.group)

    def close_children(self, reason: str) -> None:
        """Close the groups that were made from this one, without waiting for other members."""
        for child in list(self._children):
            child.close_locally(reason)
        if self._registry is not None:
            self._registry.close_unreferenced()

    def shutdown(self, reason: str) -> None:
        """Close the connections, also those of child groups, and send the reason to the other members."""
        self.control.closed = True
        for child in list(self._children):
            child.shutdown(reason)
        self._children.clear()
        self.control.close(reason)
        self.planes.close()

    @property
    def _timeout(self) -> float | None:
        """Seconds that a collective waits for a rank; None without a limit."""
        return None if self._registry is None else self._registry.timeout

    def _partners(self) -> bytes:
        """Return the group ranks of the members with which this one has pairs, as JSON."""
        return json.dumps([dst for src, dst in self._pairs if src == self.rank]).encode()


def serial_comm(device: torch.device, ranks: Sequence[int] = range(1)) -> Comm:
    """Return the group of a single process."""
    control = Control(ranks, 0)
    return Comm(control, Planes([SerialPlane()], control.size, control.rank), device=device)


def open_comm(group: dist.ProcessGroup | None, *, ranks: Sequence[int], registry: GroupRegistry) -> Comm:
    """Return a group of some ranks of a session, this rank among them or not; all ranks call it, in the same order.

    Here the data planes are chosen.

    Args:
        group: The process group of the members; None if there is none, or this rank is not a member.
        ranks: The global ranks of the members.
        registry: The groups of the session.
    """
    control = Control.of_ranks(registry, ranks)
    is_member = control.rank is not None
    planes: list[DataPlane] = []
    if is_member and len(ranks) == 1:
        planes.append(SerialPlane())
    elif control.rank is not None:
        # Some of the devices alone could not be in one graph.
        if registry.device.type == DEVICE_TYPE and len(ranks) == len(registry.ranks):
            from rankwise._comm.data.xla import XlaPlane  # noqa: PLC0415 - not needed without such devices

            planes.append(XlaPlane())
        planes += _planes_of_host(control, is_only_plane=group is None)
    if group is not None or not planes:
        planes.append(
            TorchPlane(group, ranks=ranks, rank=registry.rank, device=registry.device, dead_ranks=control.dead_ranks)
        )
    if group is not None:
        registry.backend = registry.backend or planes[-1].backend
    elif is_member:
        planes[-1].backend = registry.backend
    return Comm(control, Planes(planes, control.size, control.rank), device=registry.device, registry=registry)


def _open_connected(registry: GroupRegistry, control: Control) -> Comm:
    """Open a group that its members make alone, this rank among them; its data moves through their connections."""
    planes = [SerialPlane()] if control.size == 1 else _planes_of_host(control, is_only_plane=True)
    comm = Comm(control, Planes(planes, control.size, control.rank), device=registry.device, registry=registry)
    registry.track_group(control.group, None, comm)
    return comm


def _planes_of_host(control: Control, *, is_only_plane: bool) -> Sequence[DataPlane]:
    """Return the planes over the page of the host, and over the connections."""
    group_rank = control.require_member()
    return [plane(control, group_rank, is_only_plane=is_only_plane) for plane in (SharedMemoryPlane, SocketPlane)]


def _open_group(registry: GroupRegistry, ranks: Sequence[int]) -> Comm:
    """Open a group of some of the ranks, with a process group if its data does not move on this host's CPU alone."""
    number = registry.num_groups
    try:
        registry.close_unreferenced()
        group = None if registry.moves_data_itself() else _new_process_group(registry, ranks)
        comm = open_comm(group, ranks=tuple(ranks), registry=registry)
    finally:
        registry.num_groups = number + 1  # also if it has failed here, since it may not have failed on other ranks
    registry.track_group(number, group, comm)
    return comm


def _new_process_group(registry: GroupRegistry, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a new process group of some of the ranks; None on other ranks."""
    with listening_on(registry.gloo_interface):
        try:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=registry.timeout))
        except (RuntimeError, ValueError) as error:
            if not dist.is_initialized():
                raise NotJoinedError.destroyed() from error
            why = registry.dead_ranks() or "a rank died, or did not take part in time"
            raise CollectiveError(
                f"new_group failed on rank {registry.rank} of {len(registry.ranks)}: {why}. torch reports: {error}"
            ) from error
    return group if isinstance(group, dist.ProcessGroup) else None
