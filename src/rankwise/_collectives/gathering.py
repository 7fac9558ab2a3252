"""The values of all members of a group on each of them, with gradients if they are tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from rankwise._collectives.memory_room import require_room, with_free_memory
from rankwise._collectives.pytree import describe
from rankwise._collectives.serialization import (
    Header,
    Serialized,
    buffer_devices,
    serialize,
)
from rankwise._collectives.shared_values import Rest, SharedFiles
from rankwise._comm.buffers import device_of_bytes, same_memory, to_tensor
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import Op
from rankwise._memory import require_available

T = TypeVar("T")


class _Gather(torch.autograd.Function):
    """The parts of an all_gather of one tensor; gradients flow back to the ranks that the parts came from."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        _: torch.Tensor | None,
        __: torch.Tensor,
        comm: Comm,
        parts: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm = comm
        # Autograd forbids in-place operations on the views that a function returns, so these are not views to it.
        return tuple(map(same_memory, parts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:  # noqa: ANN401
        root = graph_root(torch.is_grad_enabled())
        return None, _GatherGradient.apply(root, ctx.comm, *grads), None, None  # type: ignore[no-untyped-call]  # torch's


class _GatherGradient(torch.autograd.Function):
    """The gradient of `_Gather`: each rank gets the sum of the gradients of its part. Its own gradient is `_Gather`."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor | None, comm: Comm, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.comm = comm
        content = str([describe(grad) for grad in grads])
        with comm.call("the gradient of all_gather", content=content) as call:
            scatter = comm.planes.reduce_scatter(grads, Op.SUM)
            call.verify()
            scatter.run()
        return scatter.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        call = ctx.comm.call("the gradient of the gradient of all_gather")
        return None, None, *gather_tensors(ctx.comm, call, grad)


def graph_root(is_needed: bool) -> torch.Tensor | None:
    """Return an input of functions whose results require a gradient, if any rank needs them to; it gets none itself.

    Without it, autograd leaves out the functions of a rank whose own inputs require no gradient. The other ranks would
    wait for it in backward.
    """
    return torch.empty(0, device="cpu", requires_grad=True) if is_needed else None


def gather_tensors(comm: Comm, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors with gradients: all of them require one if any rank's tensor does."""
    own = dense(tensor).requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
    parts = gather_values(comm, call, own)  # which keeps whether they require a gradient
    root = graph_root(torch.is_grad_enabled() and any(part.requires_grad for part in parts))
    plain = [part.detach() for part in parts]
    gathered: list[torch.Tensor] = list(_Gather.apply(root, tensor, comm, plain))  # type: ignore[no-untyped-call]  # torch's
    return gathered


def gather_values(comm: Comm, call: Call, value: T, *, is_one_tensor: bool = False) -> list[T]:
    """Gather the values of all members; if they are the parts of one tensor, side by side in memory if possible."""
    with call, SharedFiles(comm, to_all=True) as files:
        payload = with_free_memory(serialize(value))
        messages = call.all_gather(payload.header.encode())
        headers = [Header.decode(message) for message in messages]
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in headers]
        rest = Rest.before(headers)
        nbytes = sum(header.file_bytes for header in headers)
        if nbytes:
            require_room(call, nbytes, [header.free for header in headers])
        if nbytes and not is_one_tensor:
            rest = files.deliver(call, [payload], headers, range(comm.size), buffers)

        def prepare() -> Move:
            remaining = [rest.of(header) for header in headers]
            return _gather_buffers(comm, rest.of(payload), remaining, buffers, is_one_tensor=is_one_tensor)

        if rest is not Rest.NOTHING:
            call.run_prepared(prepare)
    return files.values(headers, buffers)


def _gather_buffers(
    comm: Comm,
    payload: Serialized,
    headers: Sequence[Header],
    buffers: Sequence[dict[str, torch.Tensor]],
    *,
    is_one_tensor: bool,
) -> Move:
    """Prepare to gather the buffers of every member."""
    require_available(sum(header.sizes.get("cpu", 0) for header in headers))
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
        planes = comm.planes
        moves.append(planes.all_gather_into(data, parts) if is_even else planes.all_gather_ragged(data, parts, device))
    return all_of(moves)
