"""Synchronization of gradients, without a wrapper around the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from rankwise._arguments import as_integer
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.pytree import describe
from rankwise._collectives.weights import Weight, checked_weight
from rankwise._comm.reduce_ops import Op
from rankwise._torch import uncompiled
from rankwise._training.gradient_sync import GradientSync
from rankwise._training.module_wrappers import refuse_wrappers
from rankwise.errors import InvalidArgumentError, shown

_LARGEST_STEP: Final = (1 << 63) - 1
# In the names of parameters of compiled modules.
_COMPILED: Final = "_orig_mod."


def sync_grads(
    parameters: torch.nn.Module | Iterable[torch.Tensor],
    *,
    op: str = "mean",
    weight: Weight | None = None,
    missing: str = "zeros",
    step: int | None = None,
    group: GroupLike | None = None,
) -> None:
    """Replace every gradient by its mean over all ranks, in place.

    Collective over the session, or over `group`. It writes into the gradients as `torch.distributed.all_reduce` of each
    would, in one operation for each dtype and device, and keeps nothing between calls. Half-precision gradients are
    sent, summed and divided in float32: twice the bytes of DDP, and no overflow. If a rank is lost meanwhile, all
    others raise, and some of their gradients may be reduced and others not; after all other errors no gradient has
    changed.

    Where a gradient is missing and another rank has one, the parameter gets a new one; so does a parameter whose
    gradient is expanded, and has elements that share memory. Sparse gradients are replaced by new, coalesced sparse
    tensors, unless another rank has a dense gradient. On XLA devices all that is pending is started first, in a graph
    of its own, and then the reduction; the call does not wait for either.

    For reductions during backward, use `wrap_ddp`.

    Args:
        parameters: A module, or its parameters in the same order on all ranks; those without requires_grad are ignored.
        op: "mean" or "sum".
        weight: What the gradients of this rank count in the mean, a number of at least 0, on all ranks or on none: that
            of the samples or tokens over which the loss is a mean, where ranks have different numbers of them. By
            default all count the same. Gradients of weight 0 are not used, even if they are not numbers, as those of
            the mean over an empty batch; if all weights are 0, the results are zeros. A copy of the gradients is made.
        missing: "zeros": a missing gradient counts as zero, but remains missing if no rank has one. "error": it is an
            error, which names the parameters and ranks.
        step: The number of this step, which has to be the same on all ranks. Then a rank that has left out a step, as
            by `continue` where the loss is not a number, is an error in the next one; without it, its gradients of
            that step are averaged with those that the others have of the step before.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters, or is a module of DDP or FSDP, which
            average gradients themselves; or another argument is not as above, such as a negative weight.
        PayloadTypeError: A gradient cannot be averaged: it is of 8-bit floats, or a DTensor, or has a part of its
            memory in common with another one, for example.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The parameters differ in name, number, shape or dtype, or the steps differ, or another rank calls
            another collective.
        CollectiveError: A gradient is missing, with missing="error"; or a rank is dead, or did not call within the
            session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> from rankwise import get_rank
        >>> model(torch.full((3, 2), 1.0 + get_rank())).sum().backward()  # rank 1: gradients of 6
        >>> sync_grads(model)
        >>> model.weight.grad  # on 2 ranks: tensor([[4.5000, 4.5000]])
        tensor([[3., 3.]])
    """
    comm = comm_of(group)
    with torch.no_grad():
        with comm.call("sync_grads") as call:
            trained, names = _selected(parameters)
            parsed, needs_all = _checked_op(op), _needs_all(missing)
            call.settings = {} if parsed is Op.MEAN else {"op": parsed.name}
            checked = None if weight is None else float(checked_weight(weight, parsed))
            if checked is not None:
                call.settings = {**call.settings, "weight": "given"}
            if needs_all:
                call.settings = {**call.settings, "missing": "error"}
            if step is not None:
                call.settings = {**call.settings, "step": _checked_step(step)}
            sync = GradientSync(
                comm=comm,
                call=call,
                op=parsed,
                weight=checked,
                needs_all=needs_all,
                parameters=trained,
                names=lambda: names or [f"parameter {i}" for i in range(len(trained))],
            )
            sync.exchange(" ".join(names))
        sync.finish()


def _selected(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
    """Return the parameters that require gradients, each once, and their names, if they have any."""
    if isinstance(parameters, torch.nn.Module):
        refuse_wrappers(parameters, "sync_grads")
        named = [(name, one) for name, one in uncompiled(parameters).named_parameters() if one.requires_grad]
        return [one for _, one in named], [name.replace(_COMPILED, "") for name, _ in named]
    trained = [one for one in listed_parameters(parameters, "sync_grads") if one.requires_grad]
    if not all(one.is_leaf or one.retains_grad for one in trained):
        raise InvalidArgumentError(
            "sync_grads got the result of an operation, which keeps no gradient: pass the parameter itself"
        )
    is_unique = len(set(map(id, trained))) == len(trained)
    return trained if is_unique else list({id(one): one for one in trained}.values()), []


def listed_parameters(parameters: object, caller: str) -> list[torch.Tensor]:
    """Return the parameters of a module, or in an iterable.

    Raises:
        InvalidArgumentError: It is neither.
    """
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor) and not is_array(parameters):
        listed = list(parameters)
        if all(issubclass(kind, torch.Tensor) for kind in set(map(type, listed))):
            return listed
    raise InvalidArgumentError(f"{caller} takes a module or a list of parameters, got {describe(parameters)}")


def _checked_op(op: str) -> Op:
    parsed = Op.parse(op)
    if parsed in {Op.MEAN, Op.SUM}:
        return parsed
    raise InvalidArgumentError(f"op={op!r} is not for gradients: pass 'mean' or 'sum'")


def _checked_step(step: object) -> int:
    number = as_integer(step, "step")
    if abs(number) > _LARGEST_STEP:
        raise InvalidArgumentError(f"step={shown(number)} does not fit into 64 bits")
    return number


def _needs_all(missing: object) -> bool:
    if isinstance(missing, str) and missing in {"zeros", "error"}:
        return missing == "error"
    raise InvalidArgumentError(f"missing={shown(missing)} is neither 'zeros' nor 'error'")
