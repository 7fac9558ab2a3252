"""What the drop-ins of `rankwise.compat` need beyond the public names, and other packages do not.

The drop-ins import nothing else that is private: so what they do stays possible with few names of the packages below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from rankwise._arguments import as_integer, integer
from rankwise._collectives.memory_places import check_writable
from rankwise._comm.buffers import contents as bytes_of
from rankwise._comm.buffers import overwrite
from rankwise._comm.buffers import to_tensor as tensor_of
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op, plan
from rankwise._environment.facts import LaunchEnvironment
from rankwise._pickling import Definitions, Pickler, Unpickler, dumps
from rankwise._session import adoption, current, environ, member_groups
from rankwise._session.environ import read_environment
from rankwise._session.lifecycle import preload_torch_functional
from rankwise._session.session import Session, state_behind
from rankwise._text import LEFT, ranks_text
from rankwise._torch import is_compiled
from rankwise._training.rank_control import called_on_rank_zero
from rankwise.errors import LauncherEnvironmentError

__all__ = [
    "Definitions",
    "Pickler",
    "Unpickler",
    "as_integer",
    "bytes_of",
    "called_on_rank_zero",
    "check_op",
    "check_reducible",
    "check_writable",
    "close_with_group",
    "current_session",
    "dumps",
    "exchange_topology",
    "group_of_members",
    "integer",
    "is_adopted",
    "is_compiled",
    "launch_environment",
    "new_process_group",
    "open_session",
    "overwrite",
    "ranks_text",
    "read_environment",
    "tensor_of",
    "torch_xla_environment",
    "world_group",
]


def check_op(op: str) -> str:
    """Return the name of a reduction, as `rankwise.all_reduce` takes it.

    Raises:
        InvalidArgumentError: There is no such reduction.
    """
    return Op.parse(op).name


def check_reducible(tensor: torch.Tensor, op: str) -> None:
    """Check that a tensor can be reduced by the reduction of a name.

    Raises:
        InvalidArgumentError: There is no such reduction.
        PayloadTypeError: The tensor is not dense, or the reduction is not defined for its type.
    """
    plan(dense(tensor).dtype, Op.parse(op))


def current_session() -> Session | None:
    """Return the session that was opened, or one that adopts a process group of other code; None without either.

    Local. It is looked up at each call, so that a group that was destroyed or opened anew is noticed. A session whose
    group was destroyed is closed.
    """
    opened = current.opened_session()
    if opened is not None:
        if not current.has_destroyed_group(opened):
            return Session(opened)
        opened.close(failed=True)
        current.reset_current()
    if current.default_group() is None:
        return None
    return Session(current.current_session())


def launch_environment(session: Session) -> LaunchEnvironment:
    """Return all that a session knows about the place of this process: each fact with its source.

    Local.
    """
    return state_behind(session).reading


def torch_xla_environment() -> LaunchEnvironment | None:
    """Return the launch environment of a rank that torch_xla has started, joined or not; None elsewhere.

    Local. In a process whose threads are the ranks it is that of the calling thread. torch_xla is not imported.
    """
    if "torch_xla" not in sys.modules:
        return None
    try:
        reading = environ.own_environment()
    except LauncherEnvironmentError:  # of variables, which a rank of torch_xla does not have
        return None
    return reading if reading.launcher == "torch_xla" else None


def is_adopted(session: Session) -> bool:
    """Return whether a session adopts a process group that other code opened.

    Local.
    """
    return state_behind(session) is not current.opened_session()


def open_session(open_group: Callable[[], object], environment: LaunchEnvironment) -> Session:
    """Open torch's default process group by a function, and return a session over it, which closes the group.

    Collective over the world, as the function. The numbers of the topology that no launcher provides are exchanged.

    Args:
        open_group: Calls `torch.distributed.init_process_group`; its exception is raised here.
        environment: The rank and world size, and all else that is known about this process.

    Raises:
        JoinTimeoutError: A rank did not arrive within the group's timeout.
    """
    hook = sys.excepthook  # torch replaces it in init_process_group, and does not restore it
    preload_torch_functional()
    try:
        open_group()
    except BaseException:
        sys.excepthook = hook
        raise
    group = cast("dist.ProcessGroup", dist.group.WORLD)

    def close(reason: str, _: bool) -> None:
        current.reset_current()
        comm.shutdown(reason)
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()
        sys.excepthook = hook

    session = adoption.adopt(group, environment, close=close)
    comm = session.comm
    current.set_current(session)
    try:
        session.publish_host()
        session.complete_topology()
    except Exception as error:
        session.close(reason=f"could not join: {error}", failed=True)
        raise
    return Session(session)


def exchange_topology(session: Session, *, local_rank: int | None) -> None:
    """Complete the topology of a session over a process group that other code opened.

    Collective over the session.
    """
    state = state_behind(session)
    state.publish_host()
    state.complete_topology(local_rank=local_rank)


def close_with_group(session: Session) -> None:
    """Close a session, and destroy the default process group, whoever opened it.

    Local, except on rank zero, which waits until the others no longer need the store that it serves.
    """
    comm = None if current.default_group() is None else state_behind(session).comm
    session.close()
    if comm is not None and current.default_group() is not None:  # other code opened it, and the session adopted it
        comm.shutdown(LEFT)
        current.reset_current()
        dist.destroy_process_group()


def world_group(session: Session) -> Group:
    """Return the group of all ranks of a session, which is closed with it.

    Local.
    """
    return state_behind(session).world_group


def new_process_group(ranks: Sequence[int], session: Session) -> dist.ProcessGroup | None:
    """Return a new process group of torch of some ranks of a session, with its timeout; None on the other ranks.

    Collective over the session. Unlike `rankwise.new_group()`, this does not check that all ranks pass the same ones.

    Raises:
        CollectiveError: A rank ended, or did not arrive within the session's timeout.
    """
    return member_groups.new_process_group(state_behind(session), ranks)


def group_of_members(ranks: Sequence[int], session: Session) -> Group:
    """Return a group of some ranks of a session that these make alone: no other rank calls this.

    Collective over these ranks, in ascending order, of which this rank is one.

    Raises:
        MismatchError: One of them waits in a collective over the session instead.
        CollectiveError: One of them ended.
        CollectiveTimeoutError: One of them did not arrive within the session's timeout.
    """
    return Group(member_groups.make_group(state_behind(session), tuple(ranks)))
