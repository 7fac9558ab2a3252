"""Collectives that give every rank the values of all: all_gather of anything, all_gather_cat of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from rankwise.collectives.groups import comm_of
from rankwise.collectives.payload import Letter, Parcel, bulk_devices, pack, room_for, unpack
from rankwise.collectives.trees import describe
from rankwise.comm.buffers import to_tensor
from rankwise.comm.comm import Comm, dense
from rankwise.comm.frame import Call
from rankwise.comm.members import Move
from rankwise.comm.ops import Op
from rankwise.errors import InvalidArgumentError, PayloadTypeError

T = TypeVar("T")


def all_gather(value: T, *, differentiable: bool = False, group: Comm | None = None) -> list[T]:
    """Return every rank's value, in the order of ranks.

    Collective over the session, or over `group`. Values may be tensors, of any types and of different shapes, or
    anything that can be pickled; they need not be alike. Tensors, also inside of other values, come back as from
    `torch.load` after `torch.save`: new, and leaves, which require gradients if they did; on this rank's device if they
    came from the like of it, else on the CPU.

    Args:
        value: This rank's value.
        differentiable: The value is a tensor of floats, and gradients flow back to the rank that it came from; every
            rank runs backward through it.
        group: Those who take part; all, by default.

    Raises:
        PayloadTypeError: The value cannot be pickled.
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
    call = Call("all_gather", {"differentiable": True} if differentiable else {})
    if not differentiable:
        return _gather(comm, call, lambda: value)

    def checked() -> T:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise PayloadTypeError(f"gradients flow through tensors of floats, got {describe(value)}")
        return cast("T", value.detach())  # a tensor is what it is

    if not isinstance(value, torch.Tensor):
        return _gather(comm, call, checked)
    gathered: list[T] = list(_Gather.apply(value, comm, call, checked))  # type: ignore[no-untyped-call]  # torch's
    return gathered


def all_gather_cat(
    tensor: torch.Tensor, dim: int = 0, *, differentiable: bool = False, group: Comm | None = None
) -> torch.Tensor:
    """Return every rank's tensor, in the order of ranks, as one tensor.

    Collective over the session, or over `group`. The tensors have one type and differ in size along `dim` at most,
    where they may be empty; a tensor without dimensions counts as one of one element.

    Args:
        tensor: This rank's tensor.
        dim: The dimension that they are put together along.
        differentiable: Gradients flow back to the rank that a part came from; every rank runs backward through it.
        group: Those who take part; all, by default.

    Raises:
        PayloadTypeError: It is not a dense tensor.
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
    call = Call("all_gather_cat", {"dim": dim, "differentiable": differentiable})

    def checked() -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise PayloadTypeError(f"all_gather_cat takes a tensor, got {describe(tensor)}")
        shape: list[int | str] = list(dense(tensor).shape) or [1]
        if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            raise InvalidArgumentError(f"dim={dim!r}, but the tensor has {len(shape)} dimension(s)")
        shape[dim] = "any"
        call.content = f"{tensor.dtype} {shape} {tensor.device.type}"
        call.parts = lambda: {"": describe(tensor)}
        return tensor.detach()

    if differentiable and isinstance(tensor, torch.Tensor):
        parts = list(_Gather.apply(tensor, comm, call, checked))  # type: ignore[no-untyped-call]  # torch's
    else:
        parts = _gather(comm, call, checked)
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim=dim)


class _Gather(torch.autograd.Function):
    """all_gather of one tensor, through which gradients flow back to where its parts came from."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        tensor: torch.Tensor,  # noqa: ARG004 - autograd asks for it; `checked` returns it
        comm: Comm,
        call: Call,
        checked: Callable[[], torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm = comm
        return tuple(_gather(comm, call, checked))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        return _Return.apply(ctx.comm, *grads), None, None, None  # type: ignore[no-untyped-call]  # torch's


class _Return(torch.autograd.Function):
    """The gradient of `_Gather`: to every rank the sum of the gradients of its part. Its own gradient is `_Gather`."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.comm = comm
        call = Call("the gradient of all_gather", content=str([describe(grad) for grad in grads]))
        with comm.taking_part(call):
            scatter = comm.reduce_scatter(grads, Op.SUM)
            comm.agree(call)
            finish = scatter()
        return finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        call = Call("the gradient of the gradient of all_gather")
        return None, *_Gather.apply(grad, ctx.comm, call, grad.detach)  # type: ignore[no-untyped-call]  # torch's


def _gather(comm: Comm, call: Call, checked: Callable[[], T]) -> list[T]:
    """Gather values; what `checked` raises on one rank is raised on all."""
    with comm.taking_part(call) as me:
        parcel = pack(checked())
        letters = [Letter.decode(message) for message in comm.exchange(call, parcel.letter.encode())]
    bulk: list[dict[str, torch.Tensor]] = [{} for _ in letters]
    if bulk_devices(letters):
        comm.move(call, lambda: _gather_bulk(comm, me, parcel, letters, bulk))
    return [unpack(letter, parts) for letter, parts in zip(letters, bulk, strict=True)]


def _gather_bulk(
    comm: Comm, me: int, parcel: Parcel, letters: Sequence[Letter], bulk: Sequence[dict[str, torch.Tensor]]
) -> Move[None]:
    """Prepare to gather every member's bulk."""
    moves: dict[str, Move[Sequence[torch.Tensor]]] = {}
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
    comm: Comm, me: int, parcel: Parcel, letters: Sequence[Letter], device: str
) -> Move[Sequence[torch.Tensor]]:
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
