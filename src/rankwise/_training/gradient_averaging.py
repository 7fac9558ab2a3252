"""Means of gradients: dense ones of a kind in one reduction, sparse ones as what their rows add up to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from rankwise._collectives.gather import all_gather
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import is_expanded, overwrite
from rankwise._comm.control.agreement import Completion, Prepared
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm, dense, require_dense
from rankwise._comm.reduce_ops import Op, plan

# What gradients a parameter has, on this rank or on any: bits.
NONE: Final = 1
DENSE: Final = 2
SPARSE: Final = 4

_SPARSE_LAYOUTS: Final = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def form_of(parameter: torch.Tensor) -> int:
    """Return which gradient a parameter has here.

    Raises:
        PayloadTypeError: One that cannot be averaged, or the parameter is none that could have one like the others'.
    """
    require_dense(parameter)
    plan(gradient_type(parameter), Op.MEAN)
    grad = parameter.grad
    if grad is None:
        return NONE
    if grad.layout in _SPARSE_LAYOUTS:
        return SPARSE
    require_dense(grad)
    return DENSE


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient: of the one that it has, or of the one that it would get."""
    grad = parameter.grad
    if grad is not None:
        return grad.dtype
    # Parameters have had this since torch 2.10; None allows every type.
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def forms_everywhere(comm: Comm, call: Call, forms: Sequence[int]) -> Prepared[Sequence[int]]:
    """Prepare to agree on a call, and to learn which gradients each parameter has on any rank."""
    if comm.uses_mesh:

        def run() -> Sequence[int]:
            said = comm.verify(call, bytes(forms)) or []
            together = functools.reduce(operator.or_, (int.from_bytes(message, "little") for message in said))
            return together.to_bytes(len(forms), "little")

        return run

    # There are no frames that could carry them: the backend finds the greatest of each bit.
    bits = torch.tensor([[form & bit for form in forms] for bit in (NONE, DENSE, SPARSE)], dtype=torch.uint8)
    bits = bits.to(comm.control_device)
    reduce = comm.reduce(bits, Op.MAX) if forms else None

    def run_in_many() -> Sequence[int]:
        comm.verify(call)
        if reduce is not None:
            reduce()
        return [int(form) for form in bits.sum(dim=0)]

    return run_in_many


def dense_means(parameters: Mapping[int, torch.Tensor], comm: Comm) -> Prepared[Completion[dict[int, torch.Tensor]]]:
    """Prepare the means of the dense gradients of parameters, by place; where there is none it counts as zero."""
    buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, parameter in parameters.items():
        buckets.setdefault((gradient_type(parameter), parameter.device), []).append(place)
    moves = []
    for (dtype, _), places in buckets.items():
        grads = [_dense_gradient(parameters[place], dtype).reshape(-1) for place in places]
        moves.append(comm.all_reduce(torch.cat(grads), Op.MEAN))

    def finish(means_of: Sequence[Completion[torch.Tensor]]) -> dict[int, torch.Tensor]:
        means: dict[int, torch.Tensor] = {}
        for mean, places in zip(means_of, buckets.values(), strict=True):
            parts = mean().split([parameters[place].numel() for place in places])
            means |= {place: part.view(parameters[place].shape) for place, part in zip(places, parts, strict=True)}
        return means

    def run() -> Completion[dict[int, torch.Tensor]]:
        return functools.partial(finish, [move() for move in moves])

    return run


def _dense_gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(dense(parameter), dtype=dtype) if parameter.grad is None else dense(parameter.grad)


def put_gradient(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Put a mean where the gradient is, or where one has to be that is written to by the optimizer."""
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or is_expanded(grad):
        parameter.grad = torch.empty_like(dense(parameter), dtype=values.dtype).copy_(values)
    else:
        overwrite(grad, values)


def gather_sparse(parameters: Sequence[torch.Tensor], comm: Comm) -> list[list[Any]]:
    """Return what every rank's gradients of these parameters are made of.

    Collective over the members.
    """
    with comm.collective(Call("sync_grads", {"step": "sparse gradients"})):
        mine = [_parts(parameter.grad) for parameter in parameters]
    return all_gather(mine, group=comm)


def put_sparse_means(parameters: Sequence[torch.Tensor], gathered: Sequence[Sequence[Any]], size: int) -> None:
    """Replace gradients that are sparse on some rank by their means: sparse, unless a rank has a dense one."""
    for parameter, found in zip(parameters, zip(*gathered, strict=True), strict=True):
        grads = [_whole(parts, parameter) for parts in found if parts is not None]
        dtype = grads[0].dtype
        mean = (_sum([grad.to(plan(dtype, Op.MEAN).wire_dtype) for grad in grads]) / size).to(dtype)
        if mean.layout is torch.strided:
            put_gradient(parameter, mean)
        else:
            parameter.grad = mean.coalesce()


def _parts(grad: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return what a gradient is made of: indices and values, or all of it."""
    if grad is None:
        return None
    if grad.layout is torch.strided:
        return (dense(grad),)
    whole = (grad if grad.layout is torch.sparse_coo else grad.to_sparse()).detach().coalesce()
    return whole.indices(), whole.values()


def _whole(parts: tuple[torch.Tensor, ...], parameter: torch.Tensor) -> torch.Tensor:
    here = [part.to(parameter.device) for part in parts]
    return here[0] if len(here) == 1 else _sparse(here[0], here[1], parameter.shape)


def _sum(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of gradients in the order of ranks, which is the same on all of them."""
    if any(grad.layout is torch.strided for grad in grads) or len({grad.sparse_dim() for grad in grads}) > 1:
        return functools.reduce(operator.add, (grad.to_dense() for grad in grads))
    indices = torch.cat([grad.indices() for grad in grads], dim=1)
    values = torch.cat([grad.values() for grad in grads])
    return _sparse(indices, values, grads[0].shape)


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def describe_gradients(parameters: Iterable[torch.Tensor]) -> dict[str, str]:
    """Return what has to be the same on all ranks."""
    return {f"parameter {place}": _described(parameter) for place, parameter in enumerate(parameters)}


def _described(parameter: torch.Tensor) -> str:
    dtype = gradient_type(parameter)
    own = "" if dtype == parameter.dtype else f" with a gradient of {str(dtype).removeprefix('torch.')}"
    return f"{describe(parameter)}{own}"
