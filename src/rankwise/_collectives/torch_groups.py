"""Groups of torch as the argument `group`: process groups, and device meshes. They are adopted once for a session."""

from __future__ import annotations

import threading
import weakref
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankwise._comm.comm import Comm
from rankwise._session.adoption import adopt_subgroup
from rankwise._session.current import joined_session
from rankwise._session.session import SessionState
from rankwise._torch import flattened_mesh
from rankwise._xla_use import is_own_group
from rankwise.errors import InvalidArgumentError, NotJoinedError, shown

# Each rank counts its adoptions of a process group, so two threads must not adopt one at the same time.
_adoption_lock: Final = threading.Lock()


def comm_of_torch_group(group: object) -> Comm:
    """Return the comm over a process group or a device mesh of torch.

    Local: the members connect to each other in their first collective.

    Raises:
        NotJoinedError: The process group was destroyed, or this process has not joined its world.
        InvalidArgumentError: It is not a group, this rank is not a member, the mesh has no process group of all its
            ranks, or it is a group of torch_xla of some of the ranks.
    """
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgumentError(
            "this rank is not a member of the process group: torch.distributed.new_group() has returned "
            "GroupMember.NON_GROUP_MEMBER here"
        )
    if not isinstance(group, (DeviceMesh, dist.ProcessGroup)):
        raise InvalidArgumentError(
            f"group={shown(group)} is not a group; make one with rankwise.new_group(ranks), or pass a process group of "
            'torch.distributed.new_group(), or one dimension of a DeviceMesh, such as mesh["tp"]'
        )
    session = joined_session()
    comm = session.comm
    process_group = _group_of_mesh(group, session) if isinstance(group, DeviceMesh) else group
    if is_own_group(process_group):
        if process_group is dist.group.WORLD:
            return comm
        raise InvalidArgumentError(
            f"group={shown(group)} is a process group of torch_xla, which is for tensors on XLA devices alone; make "
            "one with rankwise.new_group(ranks)"
        )
    return comm if process_group is session.group else _adopted(process_group, session)


def _group_of_mesh(mesh: DeviceMesh, session: SessionState) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of a mesh; the session's for a mesh of all ranks.

    Raises:
        InvalidArgumentError: This rank is not a member, or there is no such process group.
    """
    try:
        is_member = mesh.get_coordinate() is not None
        if is_member and mesh.ndim > 1 and mesh.size() == session.world_size:
            return session.group
        one_dimensional = mesh if mesh.ndim == 1 else flattened_mesh(mesh)
        if is_member and one_dimensional is not None:
            return one_dimensional.get_group()
    except (RuntimeError, AttributeError) as error:  # an XLA mesh has neither groups nor coordinates
        raise InvalidArgumentError(f"group={shown(mesh)} has no process group: torch reports: {error}") from error
    if not is_member:
        raise InvalidArgumentError(f"this rank is not a member of group={shown(mesh)}")
    names = mesh.mesh_dim_names or ("tp",)
    raise InvalidArgumentError(
        f"group={shown(mesh)} has {mesh.ndim} dimensions, and no process group of all its ranks; pass one of them, "
        f'such as mesh["{names[-1]}"], or the mesh that mesh._flatten() returns'
    )


def _adopted(group: dist.ProcessGroup | None, session: SessionState) -> Comm:
    """Return the comm over a process group of some ranks of a session."""
    if group is None:
        raise NotJoinedError.destroyed()
    reference = weakref.ref(group)
    comm = session.adopted.get(reference)
    try:
        dist.get_group_rank(group, session.rank)
    except ValueError as error:
        if comm is not None:
            del session.adopted[reference]
            comm.close_locally("destroyed the process group")
        raise NotJoinedError(
            f"group={shown(group)} cannot be used: it was destroyed by torch.distributed.destroy_process_group(), or "
            "not made by torch.distributed.new_group()"
        ) from error
    if comm is None:
        with _adoption_lock:
            comm = session.adopted.get(reference) or _adopt(group, session)
    return comm


def _adopt(group: dist.ProcessGroup, session: SessionState) -> Comm:
    """Adopt a process group, and close the comms of those that were destroyed and have no references any more."""
    for reference in [reference for reference in session.adopted if reference() is None]:
        session.adopted.pop(reference).close_locally("destroyed the process group")
    comm = session.adopted[weakref.ref(group)] = adopt_subgroup(group, session)
    return comm
