"""reduce: the reduction of `all_reduce`, whose result is made on one rank only."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.reduce_request import ReduceRequest
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.reduce_ops import Op
from rankwise._comm.work import Work

T = TypeVar("T")


@overload
def reduce(
    value: torch.Tensor, op: str = ..., *, dst: int | GroupRank = ..., group: GroupLike | None = ...
) -> torch.Tensor | None: ...
@overload
def reduce(
    value: bool,
    op: Literal["min", "max", "and", "or"],
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
) -> bool | None: ...
@overload
def reduce(
    value: int, op: Literal["mean"], *, dst: int | GroupRank = ..., group: GroupLike | None = ...
) -> float | None: ...
@overload
def reduce(
    value: int,
    op: Literal["sum", "product", "min", "max"] = ...,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
) -> int | None: ...
@overload
def reduce(value: int, op: str, *, dst: int | GroupRank = ..., group: GroupLike | None = ...) -> int | float | None: ...
@overload
def reduce(value: T, op: str = ..., *, dst: int | GroupRank = ..., group: GroupLike | None = ...) -> T | None: ...
@overload
def reduce(
    value: torch.Tensor,
    op: str = ...,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[torch.Tensor | None]: ...
@overload
def reduce(
    value: bool,
    op: Literal["min", "max", "and", "or"],
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[bool | None]: ...
@overload
def reduce(
    value: int,
    op: Literal["mean"],
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[float | None]: ...
@overload
def reduce(
    value: int,
    op: Literal["sum", "product", "min", "max"] = ...,
    *,
    dst: int | GroupRank = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[int | None]: ...
@overload
def reduce(
    value: int, op: str, *, dst: int | GroupRank = ..., group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[int | float | None]: ...
@overload
def reduce(
    value: T, op: str = ..., *, dst: int | GroupRank = ..., group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[T | None]: ...
@overload
def reduce(
    value: T, op: str = ..., *, dst: int | GroupRank = ..., group: GroupLike | None = ..., async_op: bool
) -> T | Any | None: ...  # noqa: ANN401 - it depends on op too
def reduce(
    value: T, op: str = "sum", *, dst: int | GroupRank = 0, group: GroupLike | None = None, async_op: bool = False
) -> T | Any | None:
    """Return the reduction of every rank's value on one rank, and None on the others.

    Collective over the session, or over `group`. Values, results and errors are those of `all_reduce`, to the last bit.

    Args:
        value: This rank's value.
        op: As for `all_reduce`.
        dst: The global rank that receives the result, or a `GroupRank`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown, or `dst` is not a member.
        PayloadTypeError: The op is not defined for the value, or the value is of another type.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The values of the ranks differ in more than their numbers, or another rank calls another
            collective, or passes another `dst`.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.reduce({"loss": 0.5, "seen": 8})  # on 2 ranks: {'loss': 1.0, 'seen': 16} on rank 0
        {'loss': 0.5, 'seen': 8}
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, reduce, value, op, dst=dst, async_op=async_op)
    with comm.call("reduce") as call:
        parsed = Op.parse(op)
        receiver = comm.group_rank_of(dst, "dst")
        call.settings = {"op": parsed.name, "dst": comm.ranks[receiver]}
        request = ReduceRequest.of(comm, call, value, parsed)
        request.exchange()
    leaves = request.leaves(is_receiver=comm.rank == receiver)
    return request.tree.rebuild(leaves) if comm.rank == receiver else None
