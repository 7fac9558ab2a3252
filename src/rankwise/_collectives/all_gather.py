"""Collectives that return the values of all ranks on every rank: all_gather of any value, all_gather_cat of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch

from rankwise._arguments import as_bool, as_integer
from rankwise._collectives.gathering import gather_tensors, gather_values
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import same_memory, side_by_side
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import require_differentiable
from rankwise._comm.work import Work
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

T = TypeVar("T")


@overload
def all_gather(
    value: T,
    *,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> list[T]: ...
@overload
def all_gather(
    value: T,
    *,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[list[T]]: ...
@overload
def all_gather(
    value: T,
    *,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
    async_op: bool,
) -> list[T] | Work[list[T]]: ...
def all_gather(
    value: T,
    *,
    differentiable: bool = False,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Return every rank's value, in the order of ranks.

    Collective over the session, or over `group`. Values are tensors of any dtype and shape, or any objects that can be
    pickled; those of different ranks may be of different types. Tensors, also inside of other values, come back as from
    `torch.load` after `torch.save`: they are new leaves, and require gradients if the originals do; but views that
    share memory, such as tied weights in a state_dict, are then apart. They are on this rank's device if the originals
    are on a device of the same type, otherwise on the CPU.

    Args:
        value: This rank's value.
        differentiable: Whether gradients flow back to the rank that a tensor came from. The value must be a dense
            tensor of floats or complex numbers, and every rank must run backward through the results, which require a
            gradient on all ranks if the tensor of any rank does.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        PayloadTypeError: The value cannot be pickled, or gradients cannot flow through it.
        RemoteRankError: This error occurred on another rank.
        MismatchError: Another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_gather(f"rank {rankwise.get_rank()}")  # on 2 ranks: ['rank 0', 'rank 1']
        ['rank 0']
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_gather, value, differentiable=differentiable, async_op=async_op)
    call = comm.call("all_gather")
    if differentiable is False:
        return gather_values(comm, call, value)
    tensor: Any = value
    with call:
        flows = as_bool(differentiable, "differentiable")
        if flows:
            call.settings = {"differentiable": True}
            if not isinstance(value, torch.Tensor):
                raise PayloadTypeError(f"gradients flow through tensors of floats, got {describe(value)}")
            dense(tensor)
            require_differentiable(tensor)
    if flows:
        return cast("list[T]", gather_tensors(comm, call, tensor))
    return gather_values(comm, call, value)


@overload
def all_gather_cat(
    tensor: torch.Tensor,
    dim: int = ...,
    *,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def all_gather_cat(
    tensor: torch.Tensor,
    dim: int = ...,
    *,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[torch.Tensor]: ...
@overload
def all_gather_cat(
    tensor: torch.Tensor, dim: int = ..., *, differentiable: bool = ..., group: GroupLike | None = ..., async_op: bool
) -> torch.Tensor | Work[torch.Tensor]: ...
def all_gather_cat(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    differentiable: bool = False,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> torch.Tensor | Work[torch.Tensor]:
    """Return every rank's tensor, in the order of ranks, as one tensor.

    Collective over the session, or over `group`. The tensors must have the same dtype, and the same shape except for
    their size along `dim`, which may be zero. A tensor without dimensions is concatenated as one of shape [1].

    Args:
        tensor: This rank's tensor.
        dim: The dimension along which the tensors are concatenated; a negative one is counted from the end.
        differentiable: Whether gradients flow back to the rank that a part came from. The tensor must be of floats or
            complex numbers, and every rank must run backward through the result, which requires a gradient on all
            ranks if the tensor of any rank does.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        PayloadTypeError: `tensor` is not a dense tensor, or gradients cannot flow through it.
        InvalidArgumentError: `tensor` has no dimension `dim`.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The tensors cannot be concatenated, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise, torch
        >>> rank = rankwise.get_rank()
        >>> rankwise.all_gather_cat(torch.tensor([rank, rank + 10]))  # on 2 ranks: tensor([ 0, 10,  1, 11])
        tensor([ 0, 10])
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_gather_cat, tensor, dim, differentiable=differentiable, async_op=async_op)
    with comm.call("all_gather_cat") as call:
        if not isinstance(tensor, torch.Tensor):
            raise PayloadTypeError(f"all_gather_cat takes a tensor, got {describe(tensor)}")
        plain = dense(tensor)
        flows = as_bool(differentiable, "differentiable")
        if flows:
            require_differentiable(tensor)
        shape: list[int | str] = list(plain.shape) or [1]
        along = as_integer(dim, "dim")
        if not -len(shape) <= along < len(shape):
            raise InvalidArgumentError(f"dim={shown(along)}, but the tensor has {len(shape)} dimension(s)")
        along %= len(shape)
        shape[along] = "any"
        call.settings = {"dim": along, "differentiable": flows}
        call.content = f"{plain.dtype} {shape} {plain.device.type}"
        call.parts = lambda: {"": describe(plain)}
    parts = gather_tensors(comm, call, tensor) if flows else gather_values(comm, call, plain, is_one_tensor=True)
    parts = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    return torch.cat(parts, dim=along) if flows else _concatenated(parts, along)


def _concatenated(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the concatenation of tensors; no copy if they have one memory, in which they are in order."""
    filled = [part for part in parts if part.numel()] or parts
    first = filled[0]
    is_in_order = first.device.type != DEVICE_TYPE and math.prod(first.shape[:dim]) == 1
    whole = (
        side_by_side([part.view(-1) for part in filled])
        if is_in_order and all(part.is_contiguous() for part in filled)
        else None
    )
    if whole is None or whole.nbytes != whole.untyped_storage().nbytes():  # which the result would keep
        return torch.cat(list(parts), dim=dim)
    shape = [*first.shape[:dim], sum(part.shape[dim] for part in filled), *first.shape[dim + 1 :]]
    return same_memory(whole.view(shape))  # a new tensor, and no view of one
