"""Where this process stands, as Ignite asks for it: in what it has joined, or alone.

Decided here: which session Ignite's functions talk in, and what is known of this rank's place without asking anybody.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Final

import torch.distributed as dist

import rankwise
from rankwise import Session
from rankwise._arguments import integer
from rankwise._environment.facts import Fact
from rankwise._net.addresses import LOOPBACK
from rankwise._net.host import host_id
from rankwise._session import current
from rankwise.errors import InvalidArgumentError, NotJoinedError

_LOOPBACK: Final = {LOOPBACK, "localhost", "::1"}
_ALONE: Final = {"local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}


class _UserSettings:
    """What `set_local_rank` was told: true of the process group that is or will be open, until `finalize`."""

    local_rank: int | None = None


_user_settings = _UserSettings()


def session_or_none() -> Session | None:
    """Return the session to talk in: the one that was opened, or one over somebody's process group; None if alone.

    Local. Looked up at each call, so a group that was destroyed or opened anew is noticed.
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
    """Return one of the numbers that place this rank, from what its launcher, its user or its address says.

    Local.

    Raises:
        NotJoinedError: None of them says.
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
        # Nobody comes there from another host.
        return {**_ALONE, "local_rank": session.rank, "local_world_size": session.world_size}[name]
    raise NotJoinedError(
        f"{name} cannot be known: the process group was opened by other code, and no variable says it; call sync() on "
        "all ranks after the group is opened, which asks them, or initialize() instead of opening it, or set LOCAL_RANK"
        " and LOCAL_WORLD_SIZE"
    )


def set_local_rank(index: int) -> None:
    """Say which rank on its node this process is, where it opens the process group itself and no variable says it.

    Local. Forgotten in `finalize`.

    Args:
        index: The local rank, from 0.

    Raises:
        InvalidArgumentError: It is no whole number from 0.

    Example:
        >>> set_local_rank(0)
        >>> forget_hint()
    """
    local_rank = integer(index)
    if local_rank is None or local_rank < 0:
        raise InvalidArgumentError(f"index={index!r} is not a local rank: a whole number from 0")
    _user_settings.local_rank = local_rank


def reset_local_rank() -> None:
    """Forget what `set_local_rank` was told.

    Local.
    """
    _user_settings.local_rank = None


def sync(temporary: bool = False) -> None:  # noqa: ARG001 - Ignite's signature
    """Look again at what was joined; over a process group that other code opened, ask all ranks where they are.

    Collective over such a process group; Local otherwise. Getters look by themselves, and never ask: it is needed only
    where they say so.

    Args:
        temporary: Accepted, and means nothing: nothing that could become stale is kept.

    Raises:
        CollectiveError: A rank is gone, or did not come within the group's timeout.

    Example:
        >>> sync()
    """
    session = session_or_none()
    if session is not None and session is not current.opened_session():
        exchange_topology(session)


def exchange_topology(session: Session) -> None:
    """Learn from the other ranks what no launcher has said of this rank's place.

    Collective over the session.
    """
    nodes = rankwise.all_gather((socket.gethostname(), host_id()), group=session.comm)
    mine = nodes[session.rank]
    learned = {
        "local_rank": nodes[: session.rank].count(mine),
        "local_world_size": Counter(nodes)[mine],
        "node_rank": list(dict.fromkeys(nodes)).index(mine),
        "num_nodes": len(set(nodes)),
    }
    if _user_settings.local_rank is not None:
        learned["local_rank"] = _user_settings.local_rank
    known = session.reading.known_topology()
    unknown = {name: Fact(value, "the other ranks") for name, value in learned.items() if name not in known}
    session.reading = session.reading.with_topology(**unknown)


def _meets_on_loopback(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of a group met at an address that is every host's own."""
    store = group.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and store.host in _LOOPBACK
