"""Reductions of gradients that are in no bucket: copies of dense ones by dtype and device; sparse ones gathered.

The gradient of a parameter may be None, dense or sparse, and may differ in that between ranks. So ranks first exchange
one byte for each parameter, whose bits are combined over the ranks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import torch

from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import is_expanded, overwrite
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.control.transports import Completion, Prepared
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op, plan, require_differentiable

# Bits for the gradient of a parameter on one rank, or, combined with OR, on several.
NO_GRADIENT: Final = 1
DENSE: Final = 2
SPARSE: Final = 4
# Of one byte that is combined.
_MOST_BITS: Final = 5

_SPARSE_LAYOUTS: Final = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def layout_bit(parameter: torch.Tensor) -> int:
    """Return the bit for the gradient that a parameter has on this rank.

    Raises:
        PayloadTypeError: The gradient cannot be averaged, or the parameter cannot have one that can.
    """
    dense(parameter)
    plan(gradient_type(parameter), Op.MEAN)
    grad = parameter.grad
    if grad is None:
        return NO_GRADIENT
    if grad.layout in _SPARSE_LAYOUTS:
        return SPARSE
    dense(grad)
    return DENSE


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradient of a parameter: of the one that it has, or of the one that it would get."""
    grad = parameter.grad
    if grad is not None:
        return grad.dtype
    # Leaf tensors have this attribute since torch 2.10; None allows every dtype.
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


def checked_gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the gradient of a parameter.

    Raises:
        PayloadTypeError: It has none that could be averaged.
    """
    require_differentiable(dense(parameter))
    return gradient_type(parameter)


def described_gradient(parameter: torch.Tensor) -> str:
    """Return a description of a parameter and its gradient: "float32[3, 4] on cpu with strides [1, 3]"."""
    dtype = gradient_type(parameter)
    own = "" if dtype == parameter.dtype else f" with a gradient of {str(dtype).removeprefix('torch.')}"
    strides = gradient_strides(parameter)
    contiguous = torch.empty(parameter.shape, device="meta").stride()
    order = "" if strides == contiguous else f" with strides {list(strides)}"
    return f"{describe(parameter)}{own}{order}"


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: those of the parameter, unless its elements share memory."""
    return torch.empty_like(parameter, device="meta").stride()


def _combine(messages: Sequence[bytes]) -> bytes:
    # As long integers, the bytes of all parameters are combined by one operation for each rank.
    combined = functools.reduce(operator.or_, (int.from_bytes(message, "little") for message in messages))
    return combined.to_bytes(len(messages[0]), "little")


def combine_bits(comm: Comm, call: Call, layouts: Sequence[int]) -> Prepared[Sequence[int]]:
    """Prepare to agree on a call, and to combine the bits of bytes, such as one for each parameter, over all ranks."""
    if comm.uses_frames:

        def run() -> Sequence[int]:
            return comm.reduce_bytes(call, bytes(layouts), _combine) or b""

        return run

    # In groups without frames the backend reduces them. It has no OR, and so takes the maximum of each bit.
    bits = torch.tensor(
        [[layout & 1 << place for layout in layouts] for place in range(_MOST_BITS)],
        dtype=torch.uint8,
        device=comm.control_device,
    )
    reduce = comm.reduce(bits, Op.MAX) if layouts else None

    def run_without_frames() -> Sequence[int]:
        comm.verify(call)
        if reduce is not None:
            reduce()
        return [int(layout) for layout in bits.sum(dim=0)]

    return run_without_frames


def reduce_by_copies(
    comm: Comm,
    call: Call,
    parameters: Sequence[torch.Tensor],
    op: Op,
    *,
    raise_missing: Callable[[], NoReturn] | None = None,
) -> Completion[None]:
    """Agree on a call, and reduce copies of gradients, in a block of `collective`; return a function for the rest.

    Args:
        comm: The group.
        call: The call.
        parameters: The parameters, the same on all members.
        op: The reduction.
        raise_missing: Called by all members if a gradient is missing on any of them; None if it counts as zero.
    """
    layouts = [layout_bit(parameter) for parameter in parameters]
    # The reduction is prepared before the ranks agree, since it allocates memory, which can fail on one rank.
    # It is right unless a gradient is sparse on some ranks and not on others; then it is prepared once more.
    local_dense = {index: parameters[index] for index, layout in enumerate(layouts) if not layout & SPARSE}
    reduce = _reduced_copies(local_dense, comm, op)
    combined = combine_bits(comm, call, layouts)()
    if raise_missing is not None and any(layout & NO_GRADIENT for layout in combined):
        raise_missing()
    if all(layout == SPARSE or not layout & SPARSE for layout in combined):
        results = reduce()
    else:
        others = {index: parameters[index] for index, layout in enumerate(combined) if not layout & SPARSE}
        results = comm.run_prepared(call, lambda: _reduced_copies(others, comm, op))

    def finish() -> None:
        reduce_sparse(comm, [one for one, layout in zip(parameters, combined, strict=True) if layout & SPARSE], op)
        for index, values in results().items():
            if combined[index] & DENSE:
                set_gradient(parameters[index], values)

    return finish


def _reduced_copies(
    parameters: Mapping[int, torch.Tensor], comm: Comm, op: Op
) -> Prepared[Completion[dict[int, torch.Tensor]]]:
    """Prepare the reduction of the dense gradients of parameters, by index; a missing gradient counts as zero."""
    buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, parameter in parameters.items():
        buckets.setdefault((gradient_type(parameter), parameter.device), []).append(index)
    moves = []
    for (dtype, _), indices in buckets.items():
        grads = [_dense_gradient(parameters[index], dtype).reshape(-1) for index in indices]
        moves.append(comm.all_reduce(torch.cat(grads), op))

    def finish(bucket_means: Sequence[Completion[torch.Tensor]]) -> dict[int, torch.Tensor]:
        means: dict[int, torch.Tensor] = {}
        for mean, indices in zip(bucket_means, buckets.values(), strict=True):
            parts = mean().split([parameters[index].numel() for index in indices])
            means |= {index: part.view(parameters[index].shape) for index, part in zip(indices, parts, strict=True)}
        return means

    def run() -> Completion[dict[int, torch.Tensor]]:
        return functools.partial(finish, [move() for move in moves])

    return run


def _dense_gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(dense(parameter), dtype=dtype) if parameter.grad is None else dense(parameter.grad)


def set_gradient(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite the gradient of a parameter; make a new gradient if there is no dense one to write to."""
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or is_expanded(grad):
        parameter.grad = torch.empty_like(dense(parameter), dtype=values.dtype).copy_(values)
    else:
        overwrite(grad, values)


def reduce_sparse(comm: Comm, parameters: Sequence[torch.Tensor], op: Op) -> None:
    """Replace gradients that are sparse on some rank by their reductions, sparse unless a rank has a dense one.

    Collective over the members, if there are parameters.
    """
    if not parameters:
        return
    with comm.collective(Call("sync_grads", {"step": "sparse gradients"})):
        parts = [_parts(parameter.grad) for parameter in parameters]
    gathered = all_gather(parts, group=Group(comm))
    # From here on no other rank waits for this one, so that allocations may fail on this rank alone.
    for parameter, of_ranks in zip(parameters, zip(*gathered, strict=True), strict=True):
        grads = [_from_parts(parts, parameter) for parts in of_ranks if parts is not None]
        if not grads:
            continue
        dtype = grads[0].dtype
        total = _sum([grad.to(plan(dtype, Op.MEAN).wire_dtype) for grad in grads])
        result = (total / (comm.size if op.is_mean else 1)).to(dtype)
        if result.layout is torch.strided:
            set_gradient(parameter, result)
        else:
            parameter.grad = result.coalesce()


def _parts(grad: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of a gradient: indices and values of a sparse one, otherwise the gradient itself."""
    if grad is None:
        return None
    if grad.layout is torch.strided:
        return (dense(grad),)
    coalesced = (grad if grad.layout is torch.sparse_coo else grad.to_sparse()).detach().coalesce()
    return coalesced.indices(), coalesced.values()


def _from_parts(parts: tuple[torch.Tensor, ...], parameter: torch.Tensor) -> torch.Tensor:
    on_device = [part.to(parameter.device) for part in parts]
    return on_device[0] if len(on_device) == 1 else _sparse(on_device[0], on_device[1], parameter.shape)


def _sum(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in the order of ranks, so that all ranks get the same bits."""
    if any(grad.layout is torch.strided for grad in grads) or len({grad.sparse_dim() for grad in grads}) > 1:
        return functools.reduce(operator.add, (grad.to_dense() for grad in grads))
    indices = torch.cat([grad.indices() for grad in grads], dim=1)
    values = torch.cat([grad.values() for grad in grads])
    return _sparse(indices, values, grads[0].shape)


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # The device is named, or it would be torch's default one.
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False).coalesce()
