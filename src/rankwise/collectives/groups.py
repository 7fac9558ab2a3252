"""Who takes part in a collective: the session, or a group. And the barrier, which moves nothing."""

from __future__ import annotations

import json
import operator
import socket
from collections.abc import Iterable

from rankwise.comm.comm import Comm
from rankwise.errors import InvalidArgumentError, MismatchError
from rankwise.session.current import joined_session


def comm_of(group: Comm | None) -> Comm:
    """Return the comm to use: `group`, or that of the session in force.

    Local.

    Raises:
        NotJoinedError: There is no group, the world is larger than one and nobody joined it.
        InvalidArgumentError: `group` is not something that `new_group` returns.
    """
    if group is None:
        return joined_session().comm
    if not isinstance(group, Comm):
        raise InvalidArgumentError(f"group={group!r} is not a group; make one with rankwise.new_group(ranks)")
    return group


def barrier(*, group: Comm | None = None) -> None:
    """Wait until every rank is here.

    Collective over the session, or over `group`. Waits for the processes, not for work queued on their accelerators.

    Raises:
        CollectiveError: A rank died, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.barrier()
    """
    comm_of(group).barrier()


def new_group(ranks: Iterable[int]) -> Comm:
    """Return a group of some of the ranks, for the `group` argument of other collectives.

    Collective over the session: every rank calls it, member or not, with the same ranks. On other ranks than the
    members the group can be held but not used.

    Args:
        ranks: The members' global ranks, each once; the group has them in ascending order.

    Raises:
        InvalidArgumentError: There are none, one is not in the world, or one stands there twice.
        MismatchError: The ranks passed different lists.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.new_group([0]).size
        1
    """
    comm = joined_session().comm
    try:
        ranks = [operator.index(rank) for rank in ranks]
    except TypeError as error:
        raise InvalidArgumentError(f"new_group takes a sequence of ranks, got {ranks!r}") from error
    wanted = json.dumps(ranks).encode()
    asked = comm.exchange(wanted)
    if len(set(asked)) > 1:
        other = next(place for place, message in enumerate(asked) if message != asked[0])
        raise MismatchError(
            f"new_group was called with different ranks: {asked[0].decode()} on rank {comm.ranks[0]}, "
            f"{asked[other].decode()} on rank {comm.ranks[other]}; every rank passes the same list"
        )
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(f"new_group takes one rank or more, each once, got {ranks}")
    for rank in ranks:
        comm.place_of(rank, "ranks")
    return comm.new_group(sorted(ranks))


def node_group() -> Comm:
    """Return the group of the ranks on this node, made when it is first asked for.

    Collective over the session. Nodes may hold different numbers of ranks.

    Raises:
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.node_group().size
        1
    """
    session = joined_session()
    session.comm.require_member()
    if session.node_comm is not None:
        return session.node_comm
    place = session.reading.node_rank
    node = socket.gethostname() if place is None else str(place.value)
    nodes: dict[bytes, list[int]] = {}
    for rank, other in zip(session.comm.ranks, session.comm.exchange(node.encode()), strict=True):
        nodes.setdefault(other, []).append(rank)
    # Every rank takes part in making every group: torch's shortcut for members alone names the group after how many
    # groups the process has, so members that had different ones before would wait for each other for ever.
    groups = {other: session.comm.new_group(ranks) for other, ranks in nodes.items()}
    session.node_comm = groups[node.encode()]
    return session.node_comm
