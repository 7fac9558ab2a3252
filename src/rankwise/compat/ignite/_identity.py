"""The session that Ignite's functions use, and the topology of this rank, as far as it is known without communication.

Alone, there is no session: the functions return at once, and the topology is rank 0 of 1.
"""

from __future__ import annotations

from typing import Final

import torch.distributed as dist

import rankwise
from rankwise import Session
from rankwise.compat.ignite._model_backends import has_xla_support
from rankwise.errors import InvalidArgumentError, NotJoinedError
from rankwise.extend._dropins import (
    current_session,
    exchange_topology,
    integer,
    is_adopted,
    launch_environment,
    torch_xla_environment,
)
from rankwise.extend.launchers import Fact, LaunchEnvironment

_LOOPBACK: Final = {"127.0.0.1", "localhost", "::1"}
_ALONE: Final = {
    "rank": 0,
    "world_size": 1,
    "local_rank": 0,
    "local_world_size": 1,
    "node_rank": 0,
    "num_nodes": 1,
}


class _UserSettings:
    """The value of `set_local_rank`: it holds for the process group that is or will be open, until `finalize`."""

    local_rank: int | None = None


_user_settings = _UserSettings()


def joined_session() -> Session | None:
    """Return the session for a collective; None alone. A rank that torch_xla has started joins the others here.

    Collective over the ranks of torch_xla where these have not joined; Local otherwise.

    Raises:
        JoinError: The ranks of torch_xla could not meet.
    """
    session = current_session()
    if session is None and has_xla_support and torch_xla_environment() is not None:
        return rankwise.init(backend="xla")
    return session


def topology_number(name: str) -> int:
    """Return a number of this rank's topology, from its launcher, `set_local_rank` or the address of rank zero.

    Local.

    Raises:
        NotJoinedError: None of them determines it.
    """
    session = current_session()
    if session is None:
        known = torch_xla_environment() if has_xla_support else None
        return _ALONE[name] if known is None else int(getattr(known, name).value)
    fact: Fact[int] | None = getattr(launch_environment(session), name)
    if fact is not None:
        return fact.value
    if name == "local_rank" and _user_settings.local_rank is not None:
        return _user_settings.local_rank
    if session.group is not None and _meets_on_loopback(session.group):
        # Only ranks of this host can connect to its loopback address.
        return {**_ALONE, "local_rank": session.rank, "local_world_size": session.world_size}[name]
    raise NotJoinedError(
        f"{name} cannot be known: the process group was opened by other code, and no variable provides it; call sync() "
        "on all ranks after the group is opened, which exchanges it, or initialize() instead of opening it, or set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE"
    )


def set_local_rank(index: int) -> None:
    """Set this process's rank on its node, where it opens the process group itself and no variable provides it.

    Local. `finalize` resets it.

    Args:
        index: The local rank, from 0.

    Raises:
        InvalidArgumentError: The index is not a whole number from 0.

    Example:
        >>> set_local_rank(0)
        >>> reset_local_rank()
    """
    local_rank = integer(index)
    if local_rank is None or local_rank < 0:
        raise InvalidArgumentError(f"index={index!r} is not a local rank: a whole number from 0")
    _user_settings.local_rank = local_rank


def reset_local_rank() -> None:
    """Discard the value of `set_local_rank`.

    Local.
    """
    _user_settings.local_rank = None


def sync(temporary: bool = False) -> None:  # noqa: ARG001 - Ignite's signature
    """Exchange the topology between the ranks of a process group that other code opened; otherwise, do nothing.

    Collective over such a process group; Local otherwise. Getters find a new process group without it, and never
    communicate. It is needed only where a getter raises an error that advises it.

    Args:
        temporary: Ignored: no state is kept that could become stale.

    Raises:
        JoinTimeoutError: A rank did not arrive within the group's timeout.

    Example:
        >>> sync()
    """
    session = current_session()
    if session is not None and is_adopted(session):
        exchange_topology(session, local_rank=_user_settings.local_rank)


def with_local_rank(environment: LaunchEnvironment) -> LaunchEnvironment:
    """Return an environment with the value of `set_local_rank`, where no launcher provides the local rank."""
    if _user_settings.local_rank is None or environment.local_rank is not None:
        return environment
    return environment.with_topology(local_rank=Fact(_user_settings.local_rank, "set_local_rank"))


def _meets_on_loopback(group: dist.ProcessGroup) -> bool:
    """Return whether the store of a group is at a loopback address."""
    store = group.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and store.host in _LOOPBACK
