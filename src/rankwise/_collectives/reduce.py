"""Reductions on all ranks: all_reduce of tensors, numbers, arrays and containers of them; all_reduce_ in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.gathering import graph_root
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.in_place import InPlaceReduction, described, descriptions
from rankwise._collectives.non_blocking import start
from rankwise._collectives.pytree import PyTree, describe
from rankwise._collectives.reduce_request import ReduceRequest, set_content
from rankwise._collectives.weights import Weight, WeightedMean, checked_weight
from rankwise._comm.buffers import same_memory
from rankwise._comm.dense_tensors import common_place
from rankwise._comm.reduce_ops import OPS, Op
from rankwise._comm.work import Work
from rankwise.errors import PayloadTypeError

T = TypeVar("T")
Tensors = TypeVar("Tensors")


@overload
def all_reduce(
    value: torch.Tensor,
    op: str = ...,
    *,
    weight: Weight | None = ...,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    value: bool, op: Literal["min", "max", "and", "or"], *, differentiable: bool = ..., group: GroupLike | None = ...
) -> bool: ...
@overload
def all_reduce(
    value: int,
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
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
    value: dict[str, int],
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
) -> dict[str, float]: ...
@overload
def all_reduce(
    value: list[int],
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
) -> list[float]: ...
@overload
def all_reduce(
    value: T, op: str = ..., *, weight: Weight | None = ..., differentiable: bool = ..., group: GroupLike | None = ...
) -> T: ...
@overload
def all_reduce(
    value: torch.Tensor,
    op: str = ...,
    *,
    weight: Weight | None = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[torch.Tensor]: ...
@overload
def all_reduce(
    value: bool, op: Literal["min", "max", "and", "or"], *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[bool]: ...
@overload
def all_reduce(
    value: int,
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
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
    value: dict[str, int],
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[dict[str, float]]: ...
@overload
def all_reduce(
    value: list[int],
    op: Literal["mean"],
    *,
    weight: Weight | None = ...,
    group: GroupLike | None = ...,
    async_op: Literal[True],
) -> Work[list[float]]: ...
@overload
def all_reduce(
    value: T, op: str = ..., *, weight: Weight | None = ..., group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[T]: ...
@overload
def all_reduce(
    value: T,
    op: str = ...,
    *,
    weight: Weight | None = ...,
    differentiable: bool = ...,
    group: GroupLike | None = ...,
    async_op: bool,
) -> T | Any: ...  # noqa: ANN401 - it depends on op too
def all_reduce(
    value: T,
    op: str = "sum",
    *,
    weight: Weight | None = None,
    differentiable: bool = False,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> T | Any:
    """Return the reduction of every rank's value, the same on all ranks.

    Collective over the session, or over `group`. A value is a tensor, a number, a numpy array, or dicts, lists, tuples,
    namedtuples and dataclasses of these. The containers are the same on all ranks except for the order of a dict's
    keys. None stays None, and a `torch.Size` is treated as a tuple.

    Tensors have the same shape, dtype and type of device on all ranks. Results are new tensors on the device of the
    input, and of its dtype with two exceptions: the sum and product of bools are int64; the mean of bools and integers
    is float64, and correct also if the sum exceeds 64 bits; rounded to float32 on a device without float64, as MPS.
    Sums and products overflow as in torch. Arrays are reduced as tensors on the CPU, and their results are arrays.

    Numbers are reduced exactly, as Python does; numbers of different types are converted to the widest one first. The
    mean of integers is a float. numpy scalars are converted to Python numbers.

    Args:
        value: This rank's value.
        op: "sum", "mean", "product", "min", "max"; "and", "or" for bools.
        weight: What this rank counts in the mean, a number of at least 0, such as that of its samples; on all ranks or
            on none. By default all count the same. A value of weight 0 is not used, even if it is not a number; if all
            weights are 0, the mean is not a number. The mean of a tensor of integers is then computed in float64.
        differentiable: Whether gradients flow back through the sum or mean of tensors of floats or complex numbers;
            every rank must run backward through the result, which requires a gradient on all ranks if the tensor of
            any rank does. Numbers and arrays in the value have no gradients. If False, results are detached.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown, or not differentiable; or `weight` is negative, infinite or not a number,
            or `op` is not "mean".
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
        >>> rank = rankwise.get_rank()
        >>> rankwise.all_reduce(0.5 + rank, op="mean", weight=3 - 2 * rank)  # on 2 ranks, 3 and 1 samples: 0.75
        0.5
    """
    comm = comm_of(group)
    if async_op is not False:
        settings = {"weight": weight, "differentiable": differentiable}
        return start(comm, all_reduce, value, op, **settings, async_op=async_op)
    with comm.call("all_reduce") as call:
        parsed = OPS[op] if type(op) is str and op in OPS else Op.parse(op)
        differentiable = differentiable is not False and as_bool(differentiable, "differentiable")
        call.settings = {"op": parsed.name, "differentiable": True} if differentiable else {"op": parsed.name}
        if weight is None:
            mean, request = None, ReduceRequest.of(comm, call, value, parsed)
        else:
            call.settings = {**call.settings, "weight": "given"}
            mean = WeightedMean.of(value, checked_weight(weight, parsed), differentiable=differentiable)
            request = ReduceRequest.of(comm, call, mean.summands, Op.SUM)
            set_content(call, mean.tree, mean.described)
        if differentiable:
            request.require_gradient()
        request.exchange()
    leaves = request.leaves()
    if differentiable:
        leaves = _with_graph(request, leaves)
    result: T = request.tree.rebuild(leaves) if mean is None else mean.result(leaves)
    return result


@overload
def all_reduce_(
    tensor: Tensors, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[False] = ...
) -> Tensors: ...
@overload
def all_reduce_(
    tensor: Tensors, op: str = ..., *, group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[Tensors]: ...
@overload
def all_reduce_(
    tensor: Tensors, op: str = ..., *, group: GroupLike | None = ..., async_op: bool
) -> Tensors | Work[Tensors]: ...
def all_reduce_(
    tensor: Tensors, op: str = "sum", *, group: GroupLike | None = None, async_op: bool = False
) -> Tensors | Work[Tensors]:
    """Reduce tensors in place, and return them: `all_reduce` without memory for the results.

    Collective over the session, or over `group`. Many tensors are reduced as one, by an operation for each dtype and
    device, and there is never a copy of all of them where ranks share memory. If a rank is lost meanwhile, all others
    raise, and some of their tensors may be reduced and others not; after all other errors no tensor has changed.

    Args:
        tensor: This rank's tensor; or dicts, lists, tuples, namedtuples and dataclasses of tensors, the same
            containers on all ranks. The same shapes and dtypes on all ranks; the dtype must be that of the result. A
            tensor that is there twice, also as another view of exactly the same memory, is reduced once; tensors that
            have a part of their memory in common are an error.
        op: As for `all_reduce`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        InvalidArgumentError: `op` is unknown.
        PayloadTypeError: A value is not a tensor, the op is not defined for its dtype, or the result has another dtype;
            or a tensor is not dense, is expanded, or has a part of its memory in common with another one.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The tensors differ in number, shape or dtype, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.all_reduce_(torch.tensor([1, 2]))  # on 2 ranks: tensor([2, 4])
        tensor([1, 2])
        >>> rankwise.all_reduce_([torch.ones(2), torch.ones(1)], op="mean")
        [tensor([1., 1.]), tensor([1.])]
    """
    comm = comm_of(group)
    if async_op is not False:
        return start(comm, all_reduce_, tensor, op, async_op=async_op)
    with comm.call("all_reduce_") as call:
        parsed = Op.parse(op)
        call.settings = {"op": parsed.name}
        tree = PyTree.of(tensor)
        tensors = _only_tensors(tree)
        place = common_place(tensors)
        reduction = InPlaceReduction(comm, tensors, parsed, place=place, name=lambda index: tree.paths()[index])
        call.content = f"{tree.text} {described(tensors, place)} {reduction.same}"
        call.parts = lambda: tree.parts(descriptions(tree.paths(), tensors, reduction.same).values())
        if len(tensors) == 1 and tensors[0].device.type != "cpu":
            call.verify_tensor(tensors[0])
        else:
            reduction.agree(call)
        reduction.run()
    reduction.finish()
    return tensor


def _only_tensors(tree: PyTree) -> list[torch.Tensor]:
    """Return the leaves of a value.

    Raises:
        PayloadTypeError: One of them is not a tensor.
    """
    for index, leaf in enumerate(tree.leaves):
        if not isinstance(leaf, torch.Tensor):
            where = f" in {path}" if (path := tree.paths()[index]) else ""
            raise PayloadTypeError(f"all_reduce_ takes a tensor, or containers of tensors, got {describe(leaf)}{where}")
    return tree.leaves


class _Reduced(torch.autograd.Function):
    """The leaves of a reduction. Its gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        request: ReduceRequest,
        leaves: Sequence[Any],
        *_: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        ctx.request = request
        # Autograd forbids in-place operations on the views that a function returns, so these are not views to it.
        return tuple(same_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        request: ReduceRequest = ctx.request
        call = request.comm.call("the gradient of all_reduce", {"op": request.op.name})
        tensor_grads = [grads[index] for index in request.tensor_indices()]
        gradient = ReduceRequest.of(request.comm, call, tensor_grads, request.op)
        leaves = gradient.run()
        gradient.requires_gradient = True  # if backward has create_graph, which all ranks give
        return None, None, None, *_with_graph(gradient, leaves)


def _with_graph(request: ReduceRequest, leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves of a reduction, through whose tensors gradients flow if they do on any rank."""
    root = graph_root(torch.is_grad_enabled() and bool(request.requires_gradient))
    return list(_Reduced.apply(request, leaves, root, *request.tensors()))  # type: ignore[no-untyped-call]  # torch's
