"""Collectives that give every rank the values of all: all_gather of anything, all_gather_cat of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from rankwise._arguments import as_bool, as_integer
from rankwise._collectives.groups import comm_of
from rankwise._collectives.pytree import describe
from rankwise._collectives.serialization import Header, Serialized, bulk_devices, pack, room_for, unpack
from rankwise._comm.buffers import same_memory, to_tensor
from rankwise._comm.control.agreement import Prepared
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm, dense
from rankwise._comm.reduce_ops import Op, require_differentiable
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

T = TypeVar("T")


def all_gather(value: T, *, differentiable: bool = False, group: Comm | None = None) -> list[T]:
    """Return every rank's value, in the order of ranks.

    Collective over the session, or over `group`. Values may be tensors, of any types and of different shapes, or
    anything that can be pickled; they need not be alike. Tensors, also inside of other values, come back as from
    `torch.load` after `torch.save`: new, and leaves, which require gradients if they did; on this rank's device if they
    came from the like of it, else on the CPU.

    Args:
        value: This rank's value.
        differentiable: The value is a dense tensor of floats or complex numbers, and gradients flow back to the rank
            that it came from; every rank runs backward through it.
        group: Those who take part; all, by default.

    Raises:
        PayloadTypeError: The value cannot be pickled, or gradients cannot flow through it.
        RemoteRankError: That happened on another rank.
        MismatchError: Another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_gather("a")
        ['a']
    """
    comm = comm_of(group)
    call = Call("all_gather")
    if differentiable is False:
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
    return cast("list[T]", _gather_tensors(comm, call, tensor)) if flows else _gather(comm, call, value)


def all_gather_cat(
    tensor: torch.Tensor, dim: int = 0, *, differentiable: bool = False, group: Comm | None = None
) -> torch.Tensor:
    """Return every rank's tensor, in the order of ranks, as one tensor.

    Collective over the session, or over `group`. The tensors have one type and differ in size along `dim` at most,
    where they may be empty; a tensor without dimensions counts as one of one element.

    Args:
        tensor: This rank's tensor.
        dim: The dimension that they are put together along; those below 0 are counted from the end.
        differentiable: Gradients flow back to the rank that a part came from, of floats or complex numbers; every rank
            runs backward through it.
        group: Those who take part; all, by default.

    Raises:
        PayloadTypeError: It is not a dense tensor, or gradients cannot flow through it.
        InvalidArgumentError: It has no such dimension.
        RemoteRankError: Either happened on another rank.
        MismatchError: The tensors do not go together, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.all_gather_cat(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    comm = comm_of(group)
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
    parts = _gather_tensors(comm, call, tensor) if flows else _gather(comm, call, plain)
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim=along)


class _Gather(torch.autograd.Function):
    """all_gather of one tensor, through which gradients flow back to where its parts came from."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        tensor: torch.Tensor,
        comm: Comm,
        call: Call,
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm = comm
        # What is a view to autograd cannot be written to outside.
        return tuple(map(same_memory, _gather(comm, call, dense(tensor))))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return _Return.apply(ctx.comm, *grads), None, None  # type: ignore[no-untyped-call]  # torch's


class _Return(torch.autograd.Function):
    """The gradient of `_Gather`: to every rank the sum of the gradients of its part. Its own gradient is `_Gather`."""

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
    """Gather tensors through which gradients flow."""
    gathered: list[torch.Tensor] = list(_Gather.apply(tensor, comm, call))  # type: ignore[no-untyped-call]  # torch's
    return gathered


def _gather(comm: Comm, call: Call, value: T) -> list[T]:
    with comm.collective(call) as me:
        parcel = pack(value)
        letters = [Header.decode(message) for message in comm.all_gather_bytes(call, parcel.letter.encode())]
    bulk: list[dict[str, torch.Tensor]] = [{} for _ in letters]
    if bulk_devices(letters):
        comm.run_prepared(call, lambda: _gather_bulk(comm, me, parcel, letters, bulk))
    return [unpack(letter, parts) for letter, parts in zip(letters, bulk, strict=True)]


def _gather_bulk(
    comm: Comm, me: int, parcel: Serialized, letters: Sequence[Header], bulk: Sequence[dict[str, torch.Tensor]]
) -> Prepared[None]:
    """Prepare to gather every member's bulk."""
    moves: dict[str, Prepared[Sequence[torch.Tensor]]] = {}
    for device in bulk_devices(letters):
        sizes = [letter.sizes.get(device, 0) for letter in letters]
        if len(set(sizes)) == 1:
            moves[device] = comm.all_gather(parcel.bulk[device])
        else:
            moves[device] = _gather_ragged(comm, me, parcel, letters, device)

    def run() -> None:
        for device, move in moves.items():
            for received, part in zip(bulk, move(), strict=True):
                received[device] = part

    return run


def _gather_ragged(
    comm: Comm, me: int, parcel: Serialized, letters: Sequence[Header], device: str
) -> Prepared[Sequence[torch.Tensor]]:
    """Prepare that each sends what it has to each: padding to the largest would cost all as much as the largest."""
    parts = [room_for(letter, comm).get(device, to_tensor(b"")) for letter in letters]
    if device in parcel.bulk:
        parts[me] = parcel.bulk[device].clone()
    others = [place for place in range(comm.size) if place != me]
    transfer = comm.transfer(
        [(parcel.bulk[device], place) for place in others if device in parcel.bulk],
        [(parts[place], place) for place in others],
    )

    def run() -> Sequence[torch.Tensor]:
        transfer()
        return parts

    return run
