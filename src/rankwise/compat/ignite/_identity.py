"""The session that Ignite's functions use, and the topology of this rank, as far as it is known without communication.

Alone, there is no session: the functions return at once, and the topology is rank 0 of 1.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Final

import torch.distributed as dist

import rankwise
from rankwise import Group, Session
from rankwise._arguments import integer
from rankwise._environment.facts import Fact
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import host_id
from rankwise._session import current
from rankwise.errors import InvalidArgumentError, NotJoinedError

_LOOPBACK: Final = {LOOPBACK, "localhost", "::1"}
_ALONE: Final = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}


class _UserSettings:
    """The value of `set_local_rank`: it holds for the process group that is or will be open, until `finalize`."""

    local_rank: int | None = None


_user_settings = _UserSettings()


def session_or_none() -> Session | None:
    """Return the session that was opened, or one that adopts a process group of other code; None if alone.

    Local. It is looked up at each call, so that a group that was destroyed or opened anew is noticed.
    """
    opened = current.opened_session()
    if opened is not None:
        if not current.has_destroyed_group(opened):
            return opened
        opened.close(failed=True)
        current.reset_current()
    if current.default_group() is None:
        return None
    return current.current_session()


def topology_number(name: str) -> int:
    """Return a number of this rank's topology, from its launcher, `set_local_rank` or the address of rank zero.

    Local.

    Raises:
        NotJoinedError: None of them determines it.
    """
    session = session_or_none()
    if session is None:
        return _ALONE[name]
    fact: Fact[int] | None = getattr(session.reading, name)
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
        CollectiveError: A rank ended, or did not arrive within the group's timeout.

    Example:
        >>> sync()
    """
    session = session_or_none()
    if session is not None and session is not current.opened_session():
        exchange_topology(session)


def exchange_topology(session: Session) -> None:
    """Complete this rank's topology from the hosts of all ranks, where no launcher provides it.

    Collective over the session.
    """
    nodes = rankwise.all_gather((socket.gethostname(), host_id()), group=Group(session.comm))
    own = nodes[session.rank]
    counted = {
        "local_rank": nodes[: session.rank].count(own),
        "local_world_size": Counter(nodes)[own],
        "node_rank": list(dict.fromkeys(nodes)).index(own),
        "num_nodes": len(set(nodes)),
    }
    if _user_settings.local_rank is not None:
        counted["local_rank"] = _user_settings.local_rank
    known = session.reading.known_topology()
    unknown = {name: Fact(value, "the other ranks") for name, value in counted.items() if name not in known}
    session.reading = session.reading.with_topology(**unknown)


def _meets_on_loopback(group: dist.ProcessGroup) -> bool:
    """Return whether the store of a group is at a loopback address."""
    store = group.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and store.host in _LOOPBACK
