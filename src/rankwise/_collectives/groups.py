"""Who takes part in a collective: the session, or a group. And the barrier, which moves nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from itertools import islice

from rankwise._arguments import as_integer, as_seconds, as_text
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm
from rankwise._session.current import joined_session
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import InvalidArgumentError, RankwiseError, shown


def comm_of(group: Comm | None) -> Comm:
    """Return the comm to use: `group`, or that of the session in force.

    Local.

    Raises:
        NotJoinedError: There is no group, the world is larger than one and nobody joined it.
        InvalidArgumentError: `group` is not something that `new_group` returns.
    """
    if group is None:
        try:
            return joined_session().comm
        except RankwiseError as error:
            strip_internal_frames(error.__traceback__, error)
            raise
    if not isinstance(group, Comm):
        raise InvalidArgumentError(f"group={shown(group)} is not a group; make one with rankwise.new_group(ranks)")
    return group


def barrier(name: str = "", *, timeout: float | None = None, group: Comm | None = None) -> None:
    """Wait until every rank is here.

    Collective over the session, or over `group`. Waits for the processes, not for work queued on their accelerators.

    Args:
        name: Which barrier this is, for people; the same on all ranks.
        timeout: Seconds to wait for the others; the session's timeout, by default. After it, all that came raise, and
            so does a rank that comes later. The next collective works. Groups of more than 64 ranks have the session's
            timeout alone.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `name` is no string, or `timeout` no number of seconds above 0.
        RemoteRankError: That happened on another rank.
        CollectiveTimeoutError: Not all ranks came in time; the message says which, and where each was seen last.
        MismatchError: Another rank calls something else, or another barrier.
        CollectiveError: A rank is gone.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.barrier("epoch 1", timeout=60)
    """
    comm = comm_of(group)
    call = Call("barrier")
    with comm.collective(call):
        if text := as_text(name, "name"):
            call.settings = {"name": text}
        comm.verify(call, timeout=None if timeout is None else as_seconds(timeout, "timeout"))


def new_group(ranks: Iterable[int]) -> Comm:
    """Return a group of some of the ranks, for the `group` argument of other collectives.

    Collective over the session: every rank calls it, member or not, with the same ranks. On other ranks than the
    members the group can be held but not used. It is closed with the session, or before by `group.close()`, by the end
    of `with rankwise.new_group(...) as group`, or, on a rank that refers to it no more, by the next `new_group()`.

    Args:
        ranks: The members' global ranks, each once; the group has them in ascending order.

    Raises:
        InvalidArgumentError: There are none, one is no integer, one is not in the world, or one stands there twice.
        RemoteRankError: That happened on another rank.
        MismatchError: The ranks passed different lists, or another rank calls something else.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.new_group([0]).size
        1
    """
    comm = joined_session().comm
    call = Call("new_group")
    with comm.collective(call):
        members = _listed(ranks, comm.size)
        if not members or len(set(members)) != len(members):
            raise InvalidArgumentError(f"new_group takes one rank or more, each once, got {shown(members)}")
        for rank in members:
            comm.group_rank_of(rank, "ranks")
        call.settings = {"ranks": sorted(members)}
        comm.verify(call)
        group = comm.new_group(sorted(members))
    group.close_refusal = ""
    return group


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
    node = (socket.gethostname() if place is None else str(place.value)).encode()
    call = Call("node_group")
    with session.comm.collective(call):
        nodes: dict[bytes, list[int]] = {}
        for rank, other in zip(session.comm.ranks, session.comm.all_gather_bytes(call, node), strict=True):
            nodes.setdefault(other, []).append(rank)
        # Every rank takes part in making every group: torch's shortcut for members alone names the group after how many
        # groups the process has, so members that had different ones before would wait for each other for ever.
        groups = {other: session.comm.new_group(ranks) for other, ranks in nodes.items()}
    session.node_comm = groups[node]
    session.node_comm.close_refusal = (
        "the group of a node is made once, and closed with its session: rankwise.finalize()"
    )
    return session.node_comm


def _listed(ranks: object, size: int) -> list[int]:
    """Return the ranks of a group; of more than there are, one more than there are.

    Raises:
        InvalidArgumentError: They are no integers.
    """
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise InvalidArgumentError(f"new_group takes a sequence of ranks, got {shown(ranks)}")
    try:
        return [as_integer(rank, "a rank of new_group") for rank in islice(ranks, size + 1)]
    except TypeError as error:  # a tensor without dimensions
        raise InvalidArgumentError(f"new_group takes a sequence of ranks, got {shown(ranks)}") from error
