"""How the groups of a session are opened: the only place where their data planes are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from rankwise._comm.comm import Comm, GroupContext
from rankwise._comm.data.plane import DataPlane
from rankwise._comm.data.serial import SerialPlane
from rankwise._comm.data.shared_memory_plane import SharedMemoryPlane
from rankwise._comm.data.socket_plane import SocketPlane
from rankwise._comm.data.torch_backend import TorchPlane
from rankwise._comm.group_link import GroupLink
from rankwise._comm.registry import GroupRegistry
from rankwise._rendezvous.signed_store import part_of
from rankwise._torch import gloo_on
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import CollectiveError, NotJoinedError

# The largest group on several hosts in which the members exchange frames. Larger groups agree through their data plane.
MAX_FRAMES_SIZE: Final = 64


def serial_comm(device: torch.device, ranks: Sequence[int] = range(1)) -> Comm:
    """Return the group of a single process."""
    return Comm(
        ranks=ranks,
        global_rank=0,
        device=device,
        planes=[SerialPlane()],
        context=GroupContext(open_group=lambda ranks: serial_comm(device, tuple(ranks))),
    )


def open_comm(group: dist.ProcessGroup | None, *, ranks: Sequence[int], registry: GroupRegistry) -> Comm:
    """Return a group of some ranks of a session, this rank among them or not; all ranks call it, in the same order.

    Args:
        group: The process group of the members; None if there is none, or this rank is not a member.
        ranks: The global ranks of the members.
        registry: The groups of the session.
    """
    link = GroupLink.of_ranks(registry, ranks)
    is_member = registry.rank in ranks
    exchange = link if uses_frames(registry, len(ranks)) else None
    planes: list[DataPlane] = []
    if is_member and len(ranks) == 1:
        planes.append(SerialPlane())
    elif is_member and exchange is not None:
        # Some of the devices alone could not be in one graph.
        if registry.device.type == DEVICE_TYPE and len(ranks) == len(registry.ranks):
            from rankwise._comm.data.xla import XlaPlane  # noqa: PLC0415 - not needed without such devices

            planes.append(XlaPlane())
        planes += _planes_over_link(link, ranks.index(registry.rank), is_only_plane=group is None)
    if group is not None or not planes:
        planes.append(
            TorchPlane(group, ranks=ranks, rank=registry.rank, device=registry.device, dead_ranks=link.dead_ranks)
        )
    if group is not None:
        registry.backend = registry.backend or planes[-1].backend
    elif is_member:
        planes[-1].backend = registry.backend
    return Comm(
        ranks=ranks,
        global_rank=registry.rank,
        device=registry.device,
        planes=planes,
        exchange=exchange if is_member else None,
        context=GroupContext(
            open_group=partial(_open_group, registry),
            reserve_group=registry.reserve_channel,
            open_pair=partial(_open_pair, registry, link) if is_member and len(ranks) > 1 else None,
            open_of_members=partial(_open_of_members, registry),
            hosts=(lambda: link.hosts) if exchange is not None and registry.shares_pages else tuple,
            uses_shared_memory=registry.shares_tensors,
            store=(lambda: part_of(registry.store(), f"group/{link.group}")) if len(ranks) > 1 else None,
            destroy=partial(registry.destroy_process_group, link.group),
            close_unreferenced=registry.close_unreferenced,
            timeout=registry.timeout,
        ),
        check=registry.check,
    )


def uses_frames(registry: GroupRegistry, size: int) -> bool:
    """Return whether the members of a group of this size exchange frames."""
    # On one host the backend listens on loopback, where other users can connect. Bytes that are unpickled must not come
    # from there, so even a large group exchanges frames.
    # XLA has no operations that wait with a timeout.
    has_backend = registry.device.type != DEVICE_TYPE
    return size > 1 and (size <= MAX_FRAMES_SIZE or registry.one_host or not has_backend)


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


def _open_pair(registry: GroupRegistry, group: GroupLink, members: Sequence[int]) -> Comm:
    """Open the group of two members of a group in which the first one sends to the second; this rank is one of them."""
    return _open_over_link(registry, GroupLink.of_pair(registry, group, members))


def _open_of_members(registry: GroupRegistry, ranks: Sequence[int], number: int) -> Comm:
    """Open a group that only its members make, this rank among them; its data moves through their connections."""
    return _open_over_link(registry, GroupLink.of_members(registry, ranks, number))


def _open_over_link(registry: GroupRegistry, link: GroupLink) -> Comm:
    ranks = link.ranks
    is_single = len(ranks) == 1
    comm = Comm(
        ranks=ranks,
        global_rank=registry.rank,
        device=registry.device,
        planes=[SerialPlane()]
        if is_single
        else _planes_over_link(link, ranks.index(registry.rank), is_only_plane=True),
        exchange=None if is_single else link,
        context=GroupContext(open_group=partial(_open_group, registry), timeout=registry.timeout),
        check=registry.check,
    )
    registry.track_group(link.group, None, comm)
    return comm


def _planes_over_link(link: GroupLink, group_rank: int, *, is_only_plane: bool) -> list[DataPlane]:
    """Return the planes over the page of the host, and over the connections."""
    return [SharedMemoryPlane(link, group_rank), SocketPlane(link, group_rank, is_only_plane=is_only_plane)]


def _new_process_group(registry: GroupRegistry, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a new process group of some of the ranks; None on other ranks."""
    with gloo_on(registry.gloo_interface):
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
