"""The group that a collective runs over: the session's, or one made by `new_group`; and the barrier."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, TypeAlias, overload

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankwise._arguments import as_integer, as_seconds, as_text
from rankwise._collectives.non_blocking import start
from rankwise._collectives.torch_groups import comm_of_torch_group
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.group import Group, comm_behind
from rankwise._comm.work import Work
from rankwise._net.host import host_id
from rankwise._session.current import joined_session
from rankwise._user_frames import strip_internal_frames
from rankwise.errors import InvalidArgumentError, RankwiseError, shown

# The values of the argument `group`.
GroupLike: TypeAlias = Group | DeviceMesh | dist.ProcessGroup


def comm_of(group: GroupLike | None) -> Comm:
    """Return the comm of a collective: that of `group`, or of the current session.

    Local.

    Raises:
        NotJoinedError: The world has more than one rank, and this process has not joined it; or `group` was destroyed.
        InvalidArgumentError: `group` is not a group, or a group of torch that this rank is not a member of.
    """
    try:
        if group is None:
            session = joined_session()
            return session.comm if session.joined_comm is None else session.joined_comm
        return comm_behind(group) if isinstance(group, Group) else comm_of_torch_group(group)
    except RankwiseError as error:
        strip_internal_frames(error.__traceback__, error)
        raise


@overload
def barrier(
    name: str = ..., *, timeout: float | None = ..., group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> None: ...
@overload
def barrier(
    name: str = ..., *, timeout: float | None = ..., group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[None]: ...
@overload
def barrier(
    name: str = ..., *, timeout: float | None = ..., group: GroupLike | None = ..., async_op: bool
) -> Work[None] | None: ...
def barrier(
    name: str = "", *, timeout: float | None = None, group: GroupLike | None = None, async_op: bool = False
) -> Work[None] | None:
    """Wait until every rank has called this function.

    Collective over the session, or over `group`. Waits for the processes, not for work queued on their accelerators.

    Args:
        name: A name for error messages; the same on all ranks.
        timeout: Seconds to wait for the other ranks; the session's timeout by default. On a timeout every rank that
            waits raises, and so does a rank that calls later; the next collective works. Ranks on several hosts wait up
            to two seconds longer, to know who is missing.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `name` is not a string, or `timeout` is not a number of seconds above 0.
        RemoteRankError: This error occurred on another rank.
        CollectiveTimeoutError: Some ranks did not call in time; the message names them, and the last call of each.
        MismatchError: Another rank calls another collective, or a barrier with another name.
        CollectiveError: A rank is dead.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.barrier("epoch 1", timeout=60)
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, barrier, name, timeout=timeout, async_op=async_op)
    with comm.call("barrier") as call:
        if text := as_text(name, "name"):
            call.settings = {"name": text}
        call.verify(timeout=None if timeout is None else as_seconds(timeout, "timeout"))
    return None


def new_group(ranks: Iterable[int]) -> Group:
    """Return a group of some of the ranks, for the `group` argument of other collectives.

    Collective over the session: every rank must call it, member or not, with the same ranks. A rank that is not a
    member gets a group that it cannot use in collectives. The group is closed with the session; or earlier by
    `group.close()`, at the end of `with rankwise.new_group(...) as group`, or, on a rank without references to it, by
    the next `new_group()`.

    Args:
        ranks: The global ranks of the members, without duplicates; the group has them in ascending order.

    Raises:
        InvalidArgumentError: `ranks` is empty, or contains a duplicate, a value that is not an integer, or a rank that
            does not exist.
        RemoteRankError: This error, or the next one, occurred on another rank.
        CollectiveError: This rank cannot open the group, for example since it has too many open files.
        MismatchError: The ranks pass different lists, or another rank calls another collective.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> with rankwise.new_group([0]) as group:  # on every rank of the session
        ...     if rankwise.get_rank() == 0:  # on the members only
        ...         print(group.size, rankwise.all_reduce(5, group=group))
        1 5
    """
    comm = joined_session().comm
    with comm.call("new_group") as call:
        members = _listed(ranks, comm.size)
        if not members or len(set(members)) != len(members):
            raise InvalidArgumentError(f"new_group takes one rank or more, each once, got {shown(members)}")
        for rank in members:
            comm.group_rank_of(rank, "ranks")
        members.sort()
        call.settings = {"ranks": members}
        return Group(open_group(comm, call, members))


def node_group() -> Group:
    """Return the group of the ranks on this node. It is made by the first call.

    Collective over the session. Nodes may hold different numbers of ranks.

    Raises:
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.node_group().size  # on 2 nodes of 8 ranks: 8
        1
    """
    return _made_once("node_group", lambda nodes: nodes)


def one_per_node_group() -> Group:
    """Return the group of the ranks that have this rank's position in their `node_group()`: one rank of each node.

    Collective over the session. It is made by the first call. Nodes may hold different numbers of ranks: a node that
    has no rank at this position has no member in the group.

    Raises:
        NotJoinedError: The world has more than one rank, and this process has not joined it.
        RemoteRankError: Another rank failed.
        MismatchError: Another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.

    Example:
        >>> import rankwise
        >>> rankwise.one_per_node_group().size  # on 2 nodes of 8 ranks: 2
        1
        >>> total = rankwise.all_reduce(1.5, group=rankwise.node_group())  # within each node first
        >>> rankwise.all_reduce(total, group=rankwise.one_per_node_group())  # on 2 nodes of 8 ranks: 24.0
        1.5
    """
    return _made_once("one_per_node_group", _by_position)


def _made_once(name: str, partition: Callable[[list[list[int]]], list[list[int]]]) -> Group:
    """Return this rank's group of a partition of the ranks; the first call makes all groups of the partition.

    Collective over the session.

    Args:
        name: The name of the public function.
        partition: Returns the partition, given the ranks of each node.
    """
    session = joined_session()
    session.comm.control.require_member()
    found = session.node_groups.get(name)
    if found is not None:
        return found
    node_rank = session.reading.node_rank
    node = "" if node_rank is None else str(node_rank.value)
    with session.comm.call(name) as call:
        own = f"{node} {host_id()} {socket.gethostname()}".encode()
        found_by_rank = [other.partition(b" ") for other in call.all_gather(own)]
        # Some ranks of a group that other code opened may have a launcher's number, and others none.
        is_numbered = all(number for number, _, _ in found_by_rank)
        nodes: dict[bytes, list[int]] = {}
        for rank, (number, _, host) in zip(session.comm.ranks, found_by_rank, strict=True):
            nodes.setdefault(number if is_numbered else host, []).append(rank)
        # Every rank takes part in making every group. torch can also make a group among its members alone, but it then
        # names the group after the number of groups in the process: members with different numbers would deadlock.
        groups = [_opened(session.comm, call, ranks) for ranks in partition(list(nodes.values()))]
    comm = next(comm for comm in groups if comm.rank is not None)
    refusal = f"the group of {name}() is made once, and closed with its session: rankwise.finalize()"
    session.node_groups[name] = group = Group(comm, close_refusal=refusal)
    return group


def open_group(comm: Comm, call: Call, ranks: Sequence[int]) -> Comm:
    """Agree on a call, and return a new group of some of the ranks, in the block of a call."""
    is_reserved = comm.reserve_group(ranks)
    call.verify()
    return comm.new_group(ranks) if is_reserved else _opened(comm, call, ranks)


def _opened(comm: Comm, call: Call, ranks: Sequence[int]) -> Comm:
    """Return a new group of some of the ranks; if one rank cannot open it, all raise."""
    opened: list[Comm] = []

    def prepare() -> Move:
        opened.append(comm.new_group(ranks))
        return all_of([])

    try:
        call.run_prepared(prepare)
    except BaseException:
        for group in opened:
            group.close_locally("was not opened by all ranks")
        raise
    return opened[0]


def _by_position(nodes: list[list[int]]) -> list[list[int]]:
    """Return the ranks at each position of the nodes that have it.

    Example:
        >>> _by_position([[0, 1, 2], [3], [4, 5]])
        [[0, 3, 4], [1, 5], [2]]
    """
    longest = max(map(len, nodes))
    return [[ranks[position] for ranks in nodes if position < len(ranks)] for position in range(longest)]


def _listed(ranks: object, size: int) -> list[int]:
    """Return the ranks as a list, which ends one after the size of the world: the input may be an endless iterator.

    Raises:
        InvalidArgumentError: They are not integers.
    """
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise InvalidArgumentError(f"new_group takes a sequence of ranks, got {shown(ranks)}")
    try:
        return [as_integer(rank, "a rank of new_group") for rank in islice(ranks, size + 1)]
    except TypeError as error:  # a tensor without dimensions
        raise InvalidArgumentError(f"new_group takes a sequence of ranks, got {shown(ranks)}") from error
