"""Collectives that return the values of all ranks on every rank: all_gather of any value, all_gather_cat of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch

from rankwise._arguments import as_bool, as_integer
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.non_blocking import start
from rankwise._collectives.pytree import describe
from rankwise._collectives.relayed_values import files_for_all
from rankwise._collectives.safe_values import is_safe, refuse_unsafe, set_safe
from rankwise._collectives.serialization import (
    Header,
    Serialized,
    buffer_devices,
    serialize,
)
from rankwise._collectives.shared_values import Rest
from rankwise._comm.buffers import device_of_bytes, from_bytes, same_memory, to_tensor
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Prepared
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import Op, require_differentiable
from rankwise._comm.tensor_operations import all_of
from rankwise._comm.work import Work
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

T = TypeVar("T")


@overload
def all_gather(
    value: T,
    *,
    differentiable: bool = ...,
    safe: bool = ...,
    group: GroupLike | None = ...,
    async_op: Literal[False] = ...,
) -> list[T]: ...
@overload
def all_gather(
    value: T, *, safe: bool = ..., group: GroupLike | None = ..., async_op: Literal[True]
) -> Work[list[T]]: ...
@overload
def all_gather(
    value: T, *, differentiable: bool = ..., safe: bool = ..., group: GroupLike | None = ..., async_op: bool
) -> list[T] | Work[list[T]]: ...
def all_gather(
    value: T,
    *,
    differentiable: bool = False,
    safe: bool = False,
    group: GroupLike | None = None,
    async_op: bool = False,
) -> list[T] | Work[list[T]]:
    """Return every rank's value, in the order of ranks.

    Collective over the session, or over `group`. Values are tensors of any dtype and shape, or any objects that can be
    pickled; those of different ranks may be of different types. Tensors, also inside of other values, come back as from
    `torch.load` after `torch.save`: they are new leaves, and require gradients if the originals do. They are on this
    rank's device if the originals are on a device of the same type, otherwise on the CPU.

    Args:
        value: This rank's value.
        differentiable: Whether gradients flow back to the rank that a tensor came from. The value must be a dense
            tensor of floats or complex numbers, and every rank must run backward through the result.
        safe: Whether to take only values of builtin types, those of `collections`, arrays and numbers of numpy, dense
            tensors, and classes passed to `register_safe`. The ranks check it before any value is unpickled.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.
        async_op: Whether to return at once, with a `Work` whose `wait()` returns the result.

    Raises:
        PayloadTypeError: The value cannot be pickled, or gradients cannot flow through it; `safe` refuses one of them.
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
        return start(comm, all_gather, value, differentiable=differentiable, safe=safe, async_op=async_op)
    call = Call("all_gather")
    if differentiable is False and safe is False:
        return _gather(comm, call, value)
    tensor: Any = value
    with comm.collective(call):
        flows = as_bool(differentiable, "differentiable")
        if flows:
            call.settings = {"differentiable": True}
            if not isinstance(value, torch.Tensor):
                raise PayloadTypeError(f"gradients flow through tensors of floats, got {describe(value)}")
            dense(tensor)
            require_differentiable(tensor)
        set_safe(call, safe)
    return cast("list[T]", _gather_tensors(comm, call, tensor)) if flows else _gather(comm, call, value)


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
            complex numbers, and every rank must run backward through the result.
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
    call = Call("all_gather_cat")
    with comm.collective(call):
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
    parts = _gather_tensors(comm, call, tensor) if flows else _gather(comm, call, plain, is_one_tensor=True)
    parts = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    return torch.cat(parts, dim=along) if flows else _concatenated(parts, along)


class _Gather(torch.autograd.Function):
    """all_gather of one tensor; gradients flow back to the ranks that its parts came from."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        tensor: torch.Tensor,
        comm: Comm,
        call: Call,
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm = comm
        # Autograd forbids in-place operations on the views that a function returns, so these are not views to it.
        return tuple(map(same_memory, _gather(comm, call, dense(tensor))))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return _GatherGradient.apply(ctx.comm, *grads), None, None  # type: ignore[no-untyped-call]  # torch's


class _GatherGradient(torch.autograd.Function):
    """The gradient of `_Gather`: each rank gets the sum of the gradients of its part. Its own gradient is `_Gather`."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.comm = comm
        call = Call("the gradient of all_gather", content=str([describe(grad) for grad in grads]))
        with comm.collective(call):
            scatter = comm.reduce_scatter(grads, Op.SUM)
            comm.verify(call)
            finish = scatter()
        return finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        call = Call("the gradient of the gradient of all_gather")
        return None, *_gather_tensors(ctx.comm, call, grad)


def _gather_tensors(comm: Comm, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors with gradients."""
    gathered: list[torch.Tensor] = list(_Gather.apply(tensor, comm, call))  # type: ignore[no-untyped-call]  # torch's
    return gathered


def _gather(comm: Comm, call: Call, value: T, *, is_one_tensor: bool = False) -> list[T]:
    """Gather the values of all members; if they are the parts of one tensor, side by side in memory if possible."""
    safe = is_safe(call)
    with comm.collective(call), files_for_all(comm) as files:
        payload = serialize(value, safe=safe)
        payload = payload if is_one_tensor else files.offer(payload)
        messages = comm.all_gather_bytes(call, payload.header.encode())
        headers = [Header.decode(message, safe=safe) for message in messages]
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        rest = Rest.before(headers)
        if any(header.needs_file for header in headers) and not is_one_tensor:
            rest = files.deliver(call, headers, buffers, range(comm.size))

        def prepare() -> Prepared[None]:
            remaining = [rest.of(header) for header in headers]
            return _gather_buffers(comm, rest.of(payload), remaining, buffers, is_one_tensor=is_one_tensor)

        if rest is not Rest.NOTHING:
            comm.run_prepared(call, prepare)
        refuse_unsafe(comm, call, zip(comm.ranks, headers, buffers, strict=True))
    return files.values(call, headers, buffers)


def _gather_buffers(
    comm: Comm,
    payload: Serialized,
    headers: Sequence[Header],
    buffers: Sequence[dict[str, torch.Tensor]],
    *,
    is_one_tensor: bool,
) -> Prepared[None]:
    """Prepare to gather the buffers of every member."""
    moves = []
    for device in buffer_devices(headers):
        sizes = [header.sizes.get(device, 0) for header in headers]
        data = payload.buffers.get(device, to_tensor(b""))
        is_even = len(set(sizes)) == 1 and sizes[0] > 0  # without contents, some members may have no buffer
        place = data.device if is_even else device_of_bytes(comm.device, device)
        # Views of one buffer would keep all of it alive, and torch.save would write all of it.
        lengths = [[sum(sizes)]] if is_one_tensor else [[size] for size in sizes]
        parts = [torch.empty(length, dtype=torch.uint8, device=place) for length in lengths]
        parts = list(parts[0].split(sizes)) if is_one_tensor else parts
        for header, received, part in zip(headers, buffers, parts, strict=True):
            if device in header.sizes:  # the contents of a file may be there otherwise
                received[device] = part
        moves.append(comm.all_gather_into(data, parts) if is_even else comm.all_gather_ragged(data, parts, device))
    return all_of(moves, None)


def _concatenated(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the concatenation of tensors; no copy if they have one memory, in which `_gather` put them in order."""
    filled = [part for part in parts if part.numel()] or parts
    first = filled[0]
    is_in_order = first.device.type == "cpu" and math.prod(first.shape[:dim]) == 1
    if not (is_in_order and all(part.is_contiguous() for part in filled) and _have_one_memory(filled)):
        return torch.cat(list(parts), dim=dim)
    memory = first.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory, 0, (memory.nbytes(),), (1,))
    shape = [*first.shape[:dim], sum(part.shape[dim] for part in filled), *first.shape[dim + 1 :]]
    return same_memory(from_bytes(whole, first.dtype, shape))  # a new tensor, and no view of one


def _have_one_memory(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors on the CPU have one memory, and fill it."""
    memory = parts[0].untyped_storage()
    addresses = {part.untyped_storage().data_ptr() for part in parts}
    return addresses == {memory.data_ptr()} and sum(part.nbytes for part in parts) == memory.nbytes()
