"""reduce_scatter: the reduction of a tensor for each rank, whose result only that rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.pytree import describe
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import Op, plan
from rankwise._comm.work import Work
from rankwise.errors import InvalidArgumentError, PayloadTypeError


@overload
def reduce_scatter(
    values: Sequence[torch.Tensor], op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    values: Sequence[torch.Tensor], op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[torch.Tensor]: ...
@overload
def reduce_scatter(
    values: Sequence[torch.Tensor], op: str = ..., *, group: GroupLike | None = ..., async_op: bool
) -> torch.Tensor | Work[torch.Tensor]: ...
def reduce_scatter(
    values: Sequence[torch.Tensor], op: str = "sum", *, group: GroupLike | None = None, async_op: bool = False
) -> torch.Tensor | Work[torch.Tensor]:
    """Return the reduction of the tensors that all ranks pass for this rank.

    Collective over the session, or over `group`. Dtypes and overflow are as for `all_reduce`.

    Args:
        values: One tensor for each member, in the order of ranks; of one dtype, and of the same shapes on all ranks.
        op: As for `all_reduce`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown, or the number of tensors is not the number of members.
        PayloadTypeError: The op is not defined for the dtype, or the dtypes differ.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The tensors differ in shape or dtype, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise, torch
        >>> tensors = list(torch.arange(rankwise.get_world_size()))
        >>> rankwise.reduce_scatter(tensors)  # on 2 ranks: tensor(0) on rank 0, tensor(2) on rank 1
        tensor(0)
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, reduce_scatter, values, op, async_op=async_op)
    with comm.call("reduce_scatter") as call:
        parsed = Op.parse(op)
        call.settings = {"op": parsed.name}
        _check_pieces(values, parsed, comm.size)
        call.content = " ".join(map(describe, values))
        call.parts = lambda: {f"[{index}]": describe(value) for index, value in enumerate(values)}
        scatter = comm.planes.reduce_scatter(values, parsed)
        call.verify_tensor(values[0])
        scatter.run()
    return scatter.finish()


def _check_pieces(values: Sequence[torch.Tensor], op: Op, size: int) -> None:
    """Check the arguments of reduce_scatter."""
    if not isinstance(values, Sequence) or not all(isinstance(value, torch.Tensor) for value in values):
        raise PayloadTypeError(
            f"reduce_scatter takes a sequence of tensors, one for each rank, as tensor.chunk(world), got "
            f"{describe(values)}"
        )
    if len(values) != size:
        raise InvalidArgumentError(f"reduce_scatter takes one tensor for each of {size} ranks, got {len(values)}")
    if len({(value.dtype, value.device) for value in values}) > 1:
        raise PayloadTypeError("reduce_scatter takes tensors of one dtype on one device")
    plan(dense(values[0]).dtype, op)
