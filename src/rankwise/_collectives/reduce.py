"""Collectives that reduce: all_reduce of tensors, numbers and containers of them; reduce_scatter of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.groups import comm_of
from rankwise._collectives.pytree import describe
from rankwise._collectives.reduce_request import ReduceRequest
from rankwise._comm.buffers import is_expanded, overwrite, same_memory
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm, dense
from rankwise._comm.reduce_ops import Op, plan
from rankwise.errors import InvalidArgumentError, PayloadTypeError

T = TypeVar("T")


@overload
def all_reduce(
    value: torch.Tensor, op: str = ..., *, differentiable: bool = ..., group: Comm | None = ...
) -> torch.Tensor: ...
@overload
def all_reduce(
    value: bool, op: Literal["min", "max", "and", "or"], *, differentiable: bool = ..., group: Comm | None = ...
) -> bool: ...
@overload
def all_reduce(value: int, op: Literal["mean"], *, differentiable: bool = ..., group: Comm | None = ...) -> float: ...
@overload
def all_reduce(
    value: int,
    op: Literal["sum", "product", "min", "max"] = ...,
    *,
    differentiable: bool = ...,
    group: Comm | None = ...,
) -> int: ...
@overload
def all_reduce(value: int, op: str, *, differentiable: bool = ..., group: Comm | None = ...) -> int | float: ...
@overload
def all_reduce(
    value: dict[str, int], op: Literal["mean"], *, differentiable: bool = ..., group: Comm | None = ...
) -> dict[str, float]: ...
@overload
def all_reduce(
    value: list[int], op: Literal["mean"], *, differentiable: bool = ..., group: Comm | None = ...
) -> list[float]: ...
@overload
def all_reduce(value: T, op: str = ..., *, differentiable: bool = ..., group: Comm | None = ...) -> T: ...
def all_reduce(value: T, op: str = "sum", *, differentiable: bool = False, group: Comm | None = None) -> T | Any:
    """Return the reduction of every rank's value, the same on all ranks.

    Collective over the session, or over `group`. A value is a tensor, a number, an array of numpy's, or dicts, lists,
    tuples, namedtuples and dataclasses of them, the same on all ranks but for the order of a dict; None stays None.
    Arrays are reduced as tensors on the CPU are, and the results are arrays; numpy's scalars are numbers, and the
    results are Python's. A `torch.Size` is the tuple that it is. Tensors have the same
    shape, type and kind of device on all ranks; results are new, on the tensor's device, and of its type, but for bools
    (their sum and product are int64) and the mean of integers (float64, right also where their sum has more than 64
    bits). Sums and products of tensors overflow as in torch. Numbers are reduced as Python does, exactly; if they are
    of several types, all are made the widest first. The mean of integers is a float.

    Args:
        value: This rank's value.
        op: "sum", "mean", "product", "min", "max"; "and", "or" for bools.
        differentiable: Gradients flow back through the sum or mean of tensors of floats or complex numbers; every rank
            runs backward through it. Numbers and arrays beside the tensors are reduced without. Else results are
            detached.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: There is no such op, or it is not differentiable.
        PayloadTypeError: The op is not defined for the value, or the value is not one of these.
        RemoteRankError: Either happened on another rank.
        MismatchError: The ranks' values differ in anything but the numbers, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_reduce(3), rankwise.all_reduce(3, op="mean"), rankwise.all_reduce(True, op="and")
        (3, 3.0, True)
        >>> rankwise.all_reduce({"loss": 0.5, "seen": 8})
        {'loss': 0.5, 'seen': 8}
    """
    comm = comm_of(group)
    call = Call("all_reduce")
    with comm.collective(call):
        parsed = Op.parse(op)
        differentiable = as_bool(differentiable, "differentiable")
        call.settings = {"op": parsed.name, "differentiable": True} if differentiable else {"op": parsed.name}
        job = ReduceRequest.of(comm, call, value, parsed)
        if differentiable:
            job.require_gradient()
    # torch's Function.apply has no types.
    leaves = list(_Reduce.apply(job, *job.tensors())) if differentiable else job.run()  # type: ignore[no-untyped-call]
    result: T = job.tree.rebuild(leaves)
    return result


def all_reduce_(tensor: torch.Tensor, op: str = "sum", *, group: Comm | None = None) -> torch.Tensor:
    """Reduce a tensor in place, and return it: `all_reduce` without memory for another.

    Collective over the session, or over `group`.

    Args:
        tensor: This rank's tensor; the same shape and type on all ranks. It must be able to hold the result.
        op: As for `all_reduce`.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: There is no such op.
        PayloadTypeError: The op is not defined for the type, or the result has another.
        RemoteRankError: Either happened on another rank.
        MismatchError: The tensors differ in shape or type, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.all_reduce_(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    comm = comm_of(group)
    call = Call("all_reduce_")
    with comm.collective(call):
        parsed = Op.parse(op)
        call.settings = {"op": parsed.name}
        if not isinstance(tensor, torch.Tensor):
            raise PayloadTypeError(f"all_reduce_ takes a tensor, got {describe(tensor)}")
        target = dense(tensor)
        if is_expanded(target):
            raise PayloadTypeError(
                f"{describe(tensor)} is expanded: several of its elements are one in memory; use all_reduce, or pass "
                "tensor.clone()"
            )
        how = plan(target.dtype, parsed)
        result = how.finish(torch.empty(0, dtype=how.wire_dtype, device="cpu"), 1)
        if result.dtype != tensor.dtype:
            raise PayloadTypeError(
                f"op={parsed.name!r} of {tensor.dtype} has another type, {result.dtype}: use all_reduce"
            )
        job = ReduceRequest.of(comm, call, tensor, parsed, in_place=True)
    (result,) = job.run()
    overwrite(tensor, result)
    return tensor


def reduce_scatter(values: Sequence[torch.Tensor], op: str = "sum", *, group: Comm | None = None) -> torch.Tensor:
    """Return the reduction of every rank's value for this rank.

    Collective over the session, or over `group`. The result is as that of `all_reduce`.

    Args:
        values: One tensor for each member, in the order of ranks; of one type, and of the same shapes on all ranks.
        op: As for `all_reduce`.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: There is no such op, or not one tensor for each member.
        PayloadTypeError: The op is not defined for the type, or the types differ.
        RemoteRankError: Either happened on another rank.
        MismatchError: The tensors differ in shape or type, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.reduce_scatter([torch.tensor([1, 2])])
        tensor([1, 2])
    """
    comm = comm_of(group)
    call = Call("reduce_scatter")
    with comm.collective(call):
        parsed = Op.parse(op)
        call.settings = {"op": parsed.name}
        _check_pieces(values, parsed, comm.size)
        call.content = " ".join(map(describe, values))
        call.parts = lambda: {f"[{place}]": describe(value) for place, value in enumerate(values)}
        scatter = comm.reduce_scatter(values, parsed)
        if comm.check or values[0].device.type == "cpu":
            comm.verify(call)
        finish = scatter()
    return finish()


class _Reduce(torch.autograd.Function):
    """A reduction whose gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, job: ReduceRequest, *tensors: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401, ARG004
        ctx.job = job
        # What is a view to autograd cannot be written to outside.
        return tuple(same_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in job.run())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        job: ReduceRequest = ctx.job
        call = Call("the gradient of all_reduce", {"op": job.op.name})
        wanted = [grads[place] for place in job.places_of_tensors()]
        gradient = ReduceRequest.of(job.comm, call, wanted, job.op)
        return None, *_Reduce.apply(gradient, *gradient.tensors())  # type: ignore[no-untyped-call]  # torch's


def _check_pieces(values: Sequence[torch.Tensor], op: Op, size: int) -> None:
    """Check what reduce_scatter takes."""
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
