"""Synchronization of gradients, without a wrapper around the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Final

import torch

from rankwise._arguments import as_bool, integer
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.pytree import describe
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise._comm.reduce_ops import Op
from rankwise._session.current import joined_session
from rankwise._torch import uncompiled
from rankwise._training.gradient_layout import layouts_of
from rankwise._training.gradient_sync import GradientSync
from rankwise._training.module_wrappers import refuse_wrappers
from rankwise.errors import InvalidArgumentError, shown

_MEBIBYTE: Final = 1 << 20
_DEFAULT_BUCKET_MB: Final = 25
# In the names of parameters of compiled modules.
_COMPILED: Final = "_orig_mod."


def sync_grads(
    parameters: torch.nn.Module | Iterable[torch.Tensor],
    *,
    op: str = "mean",
    bucket_mb: float = _DEFAULT_BUCKET_MB,
    missing: str = "zeros",
    overlap: bool = False,
    group: GroupLike | None = None,
) -> None:
    """Replace every gradient by its mean over all ranks.

    Collective over the session, or over `group`. Half-precision gradients are summed and divided in float32.

    Gradients become views of persistent buckets, which are reduced as they are, without copies. The first call makes
    the buckets; they take the place of the gradients in memory, and a few small tensors more. They belong to the
    parameters: there is no object to keep, and `release_grads` removes them. A tensor that was a gradient before the
    call is not changed, unless it is a view of other memory, such as a flat buffer of the program, or part of a graph.
    Frozen or added parameters, and parameters of another dtype or device, get new buckets. Copies and pickles of
    parameters have none.

    Sparse gradients are replaced by new, coalesced sparse tensors, unless another rank has a dense gradient. On XLA
    devices all that is pending is started first, in a graph of its own, and then the reduction of copies of the
    gradients; the call does not wait for either.

    Args:
        parameters: A module, or its parameters in the same order on all ranks; those without requires_grad are ignored.
        op: "mean" or "sum".
        bucket_mb: The size of a bucket in MiB; the same on all ranks.
        missing: "zeros": a missing gradient counts as zero, but remains missing if no rank has one. "error": it is an
            error, which names the parameters and ranks.
        overlap: Whether the next backward() starts to reduce the buckets, each when the last of its gradients is there;
            `sync_grads` waits for them. All but the last backward() of a step belong into `no_sync`, and gradients are
            changed after `sync_grads` only. Not with a group of some of the ranks; without effect on XLA devices.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters, or is a module of DDP or FSDP, which
            average gradients themselves; or another argument is not as above.
        PayloadTypeError: A gradient cannot be averaged: it is of 8-bit floats, or a DTensor, for example.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The parameters differ in name, number, shape, dtype or strides, or another rank calls another
            collective.
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
    call = Call("sync_grads")
    with torch.no_grad():
        with comm.collective(call):
            listed, names = _selected(parameters, "sync_grads")
            parsed, size, needs_all = _checked_op(op), _checked_megabytes(bucket_mb), _needs_all(missing)
            settings = {"op": (parsed.name, "mean"), "bucket_mb": (size, _DEFAULT_BUCKET_MB)}
            settings["missing"] = ("error" if needs_all else "zeros", "zeros")
            call.settings = {name: value for name, (value, default) in settings.items() if value != default}
            if is_overlapped := as_bool(overlap, "overlap"):
                call.settings = {**call.settings, "overlap": True}
                _require_all_ranks(comm)
            sync = GradientSync(comm, parsed, size * _MEBIBYTE, needs_all, listed, names, is_overlapped)
            finish = sync.exchange(call)
        finish()


def release_grads(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Remove the buckets and hooks that `sync_grads` has made for parameters; gradients get memory of their own.

    Local. Parameters that share buckets with these lose them too. The next `sync_grads` makes new ones, if all ranks
    release them or not.

    Args:
        parameters: A module or parameters.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> sync_grads(model)
        >>> release_grads(model)
        >>> model.weight.grad
        tensor([[3., 3.]])
    """
    listed = listed_parameters(parameters, "release_grads")
    with torch.no_grad():
        for layout in list(layouts_of(listed)):
            layout.release()


@contextmanager
def no_sync(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """Accumulate gradients in a block, without starting reductions of `sync_grads(overlap=True)` in backward().

    Local. For all but the last backward() of a step. Without `overlap=True`, it has no effect.

    Args:
        parameters: A module or parameters, as for `sync_grads`.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> for _ in range(2):
        ...     model.zero_grad()
        ...     with no_sync(model):
        ...         model(torch.ones(3, 2)).sum().backward()
        ...     model(torch.ones(3, 2)).sum().backward()
        ...     sync_grads(model, overlap=True)
        >>> model.weight.grad
        tensor([[6., 6.]])
    """
    layouts = layouts_of(listed_parameters(parameters, "no_sync"))
    paused = [layout.overlap for layout in layouts if layout.overlap is not None]
    for overlap in paused:
        overlap.paused += 1
    try:
        yield
    finally:
        for overlap in paused:
            overlap.paused -= 1


def _require_all_ranks(comm: Comm) -> None:
    if comm.size != joined_session().comm.size:  # a new group is numbered by all ranks
        raise InvalidArgumentError("overlap=True is for all ranks: leave it out with a group of some of them")


def _selected(
    parameters: torch.nn.Module | Iterable[torch.Tensor], caller: str
) -> tuple[list[torch.Tensor], Callable[[], Sequence[str]]]:
    """Return the parameters that require gradients, each once, and a function that returns their names."""
    if isinstance(parameters, torch.nn.Module):
        refuse_wrappers(parameters, caller)
        module = uncompiled(parameters)
        return [one for one in module.parameters() if one.requires_grad], functools.partial(_names, module)
    listed = [one for one in listed_parameters(parameters, caller) if one.requires_grad]
    is_unique = len(set(map(id, listed))) == len(listed)
    trained = listed if is_unique else list({id(one): one for one in listed}.values())
    return trained, lambda: [f"parameter {index}" for index in range(len(trained))]


def _names(module: torch.nn.Module) -> list[str]:
    return [name.replace(_COMPILED, "") for name, one in module.named_parameters() if one.requires_grad]


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


def _checked_megabytes(value: object) -> float:
    if integer(value) is not None or (isinstance(value, Real) and not isinstance(value, bool)):
        try:
            size = float(value)  # type: ignore[arg-type]  # a number is one
        except OverflowError:
            size = float("inf")
        if size > 0:
            return size
    raise InvalidArgumentError(f"bucket_mb={shown(value)} is not a number of MiB above 0")


def _needs_all(missing: object) -> bool:
    if isinstance(missing, str) and missing in {"zeros", "error"}:
        return missing == "error"
    raise InvalidArgumentError(f"missing={shown(missing)} is neither 'zeros' nor 'error'")
