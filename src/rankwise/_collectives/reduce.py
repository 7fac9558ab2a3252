"""Reductions on all ranks: all_reduce of tensors, numbers, arrays and containers of them; all_reduce_ of one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.pytree import PyTree, describe
from rankwise._collectives.reduce_request import ReduceRequest, set_content
from rankwise._comm.buffers import is_expanded, overwrite, same_memory
from rankwise._comm.comm import INLINE_BYTES, Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import OPS, Op, ReductionRecipe, plan
from rankwise._comm.work import Work
from rankwise.errors import PayloadTypeError

T = TypeVar("T")


@overload
def all_reduce(
    value: torch.Tensor, op: str = ..., *, differentiable: bool = ..., group: GroupLike | None = ...
) -> torch.Tensor: ...
@overload
def all_reduce(
    value: bool, op: Literal["min", "max", "and", "or"], *, differentiable: bool = ..., group: GroupLike | None = ...
) -> bool: ...
@overload
def all_reduce(
    value: int, op: Literal["mean"], *, differentiable: bool = ..., group: GroupLike | None = ...
) -> float: ...
@overload
def all_reduce(
    value: int,
    op: Literal["sum", "product", "min", "max"] = ...,
    *,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
) -> int: ...
@overload
def all_reduce(value: int, op: str, *, differentiable: bool = ..., group: GroupLike | None = ...) -> int | float: ...
@overload
def all_reduce(
    value: dict[str, int], op: Literal["mean"], *, differentiable: bool = ..., group: GroupLike | None = ...
) -> dict[str, float]: ...
@overload
def all_reduce(
    value: list[int], op: Literal["mean"], *, differentiable: bool = ..., group: GroupLike | None = ...
) -> list[float]: ...
@overload
def all_reduce(value: T, op: str = ..., *, differentiable: bool = ..., group: GroupLike | None = ...) -> T: ...
@overload
def all_reduce(
    value: torch.Tensor, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[torch.Tensor]: ...
@overload
def all_reduce(
    value: bool, op: Literal["min", "max", "and", "or"], *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[bool]: ...
@overload
def all_reduce(
    value: int, op: Literal["mean"], *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[float]: ...
@overload
def all_reduce(
    value: int,
    op: Literal["sum", "product", "min", "max"] = ...,
    *,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[int]: ...
@overload
def all_reduce(value: int, op: str, *, group: GroupLike | None = ..., async_op: Literal[True]) -> Work[int | float]: ...
@overload
def all_reduce(
    value: dict[str, int], op: Literal["mean"], *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[dict[str, float]]: ...
@overload
def all_reduce(
    value: list[int], op: Literal["mean"], *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[list[float]]: ...
@overload
def all_reduce(value: T, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[True]) -> Work[T]: ...
@overload
def all_reduce(
    value: T, op: str = ..., *, differentiable: bool = ..., group: GroupLike | None = ..., async_op: bool
) -> T | Any: ...  # noqa: ANN401 - it depends on op too
def all_reduce(
    value: T, op: str = "sum", *, differentiable: bool = False, group: GroupLike | None = None, async_op: bool = False
) -> T | Any:
    """Return the reduction of every rank's value, the same on all ranks.

    Collective over the session, or over `group`. A value is a tensor, a number, a numpy array, or dicts, lists, tuples,
    namedtuples and dataclasses of these. The containers are the same on all ranks except for the order of a dict's
    keys. None stays None, and a `torch.Size` is treated as a tuple.

    Tensors have the same shape, dtype and type of device on all ranks. Results are new tensors on the device of the
    input, and of its dtype with two exceptions: the sum and product of bools are int64; the mean of bools and integers
    is float64, and correct also if the sum exceeds 64 bits. Sums and products overflow as in torch. Arrays are reduced
    as tensors on the CPU, and their results are arrays.

    Numbers are reduced exactly, as Python does; numbers of different types are converted to the widest one first. The
    mean of integers is a float. numpy scalars are converted to Python numbers.

    Args:
        value: This rank's value.
        op: "sum", "mean", "product", "min", "max"; "and", "or" for bools.
        differentiable: Whether gradients flow back through the sum or mean of tensors of floats or complex numbers;
            every rank must run backward through the result. Numbers and arrays in the value have no gradients. If
            False, results are detached.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown, or not differentiable.
        PayloadTypeError: The op is not defined for the value, or the value is of another type.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The values of the ranks differ in more than their numbers, or another rank calls another
            collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_reduce(3), rankwise.all_reduce(3, op="mean")  # on 2 ranks: (6, 3.0)
        (3, 3.0)
        >>> rankwise.all_reduce({"loss": 0.5, "seen": 8})  # on 2 ranks: {'loss': 1.0, 'seen': 16}
        {'loss': 0.5, 'seen': 8}
        >>> rankwise.all_reduce(rankwise.get_rank() == 0, op="and")  # on 2 ranks: False
        True
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_reduce, value, op, differentiable=differentiable, async_op=async_op)
    call = Call("all_reduce")
    with comm.collective(call):
        parsed = OPS[op] if type(op) is str and op in OPS else Op.parse(op)
        differentiable = differentiable is not False and as_bool(differentiable, "differentiable")
        call.settings = {"op": parsed.name, "differentiable": True} if differentiable else {"op": parsed.name}
        request = ReduceRequest.of(comm, call, value, parsed)
        if differentiable:
            request.require_gradient()
        else:
            finish = request.exchange()
    # torch's Function.apply has no types.
    leaves = list(_Reduce.apply(request, *request.tensors())) if differentiable else finish()  # type: ignore[no-untyped-call]
    result: T = request.tree.rebuild(leaves)
    return result


@overload
def all_reduce_(
    tensor: torch.Tensor, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> torch.Tensor: ...
@overload
def all_reduce_(
    tensor: torch.Tensor, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[torch.Tensor]: ...
@overload
def all_reduce_(
    tensor: torch.Tensor, op: str = ..., *, group: GroupLike | None = ..., async_op: bool
) -> torch.Tensor | Work[torch.Tensor]: ...
def all_reduce_(
    tensor: torch.Tensor, op: str = "sum", *, group: GroupLike | None = None, async_op: bool = False
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduce a tensor in place, and return it: `all_reduce` without memory for the result.

    Collective over the session, or over `group`.

    Args:
        tensor: This rank's tensor; the same shape and dtype on all ranks. Its dtype must be that of the result.
        op: As for `all_reduce`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown.
        PayloadTypeError: The op is not defined for the dtype, or its result has another dtype.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The tensors differ in shape or dtype, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.all_reduce_(torch.tensor([1, 2]))  # on 2 ranks: tensor([2, 4])
        tensor([1, 2])
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_reduce_, tensor, op, async_op=async_op)
    call = Call("all_reduce_")
    with comm.collective(call):
        parsed = Op.parse(op)
        call.settings = {"op": parsed.name}
        if not isinstance(tensor, torch.Tensor):
            raise PayloadTypeError(f"all_reduce_ takes a tensor, got {describe(tensor)}")
        target = dense(tensor)
        if is_expanded(tensor):
            raise PayloadTypeError(
                f"{describe(tensor)} is expanded: several of its elements share memory; use all_reduce, or pass "
                "tensor.clone()"
            )
        recipe = plan(target.dtype, parsed)
        dtype = _result_dtype(target.dtype, parsed)
        if dtype != tensor.dtype:
            raise PayloadTypeError(f"op={parsed.name!r} of {tensor.dtype} has another dtype, {dtype}: use all_reduce")
        if _is_reduced_directly(comm, target, recipe):
            finish = _reduce_directly(comm, call, target, parsed, recipe)
        else:
            finish = ReduceRequest.of(comm, call, tensor, parsed, in_place=True).exchange()
    (result,) = finish()
    overwrite(tensor, result)
    return tensor


@functools.cache
def _result_dtype(dtype: torch.dtype, op: Op) -> torch.dtype:
    """Return the dtype of the reduction of tensors of a dtype."""
    recipe = plan(dtype, op)
    return recipe.finish(torch.empty(0, dtype=recipe.wire_dtype, device="cpu"), 1).dtype


def _is_reduced_directly(comm: Comm, target: torch.Tensor, recipe: ReductionRecipe) -> bool:
    """Return whether a dense tensor is in wire format where it is, and needs nothing else of a `ReduceRequest`."""
    return (
        recipe.wire_dtype is target.dtype
        and target.device.type == "cpu"
        and target.nbytes > INLINE_BYTES
        and comm.uses_frames
        and target.is_contiguous()
        and not target.is_inference()
    )


def _reduce_directly(
    comm: Comm, call: Call, target: torch.Tensor, op: Op, recipe: ReductionRecipe
) -> Callable[[], list[torch.Tensor]]:
    """Agree on the call as a `ReduceRequest` of the tensor would, in less time, and reduce it; return the rest."""
    set_content(call, PyTree.of(target), (describe(target),))
    move = comm.reduce(target.view(-1), op)
    comm.verify(call)
    move()
    return lambda: [recipe.finish(target, comm.size)]


class _Reduce(torch.autograd.Function):
    """A reduction. Its gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, request: ReduceRequest, *tensors: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401, ARG004
        ctx.request = request
        # Autograd forbids in-place operations on the views that a function returns, so these are not views to it.
        return tuple(same_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in request.run())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        request: ReduceRequest = ctx.request
        call = Call("the gradient of all_reduce", {"op": request.op.name})
        tensor_grads = [grads[index] for index in request.tensor_indices()]
        gradient = ReduceRequest.of(request.comm, call, tensor_grads, request.op)
        return None, *_Reduce.apply(gradient, *gradient.tensors())  # type: ignore[no-untyped-call]  # torch's
