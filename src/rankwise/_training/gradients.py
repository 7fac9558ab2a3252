"""Gradients and parameters: the same on all ranks, without a wrapper around the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rankwise._collectives.groups import comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import as_bytes, from_bytes, overwrite
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm, dense
from rankwise._training.gradient_averaging import (
    DENSE,
    SPARSE,
    dense_means,
    describe_gradients,
    form_of,
    forms_everywhere,
    gather_sparse,
    put_gradient,
    put_sparse_means,
)
from rankwise.errors import InvalidArgumentError


def sync_grads(parameters: torch.nn.Module | Iterable[torch.Tensor], *, group: Comm | None = None) -> None:
    """Replace every gradient by its mean over all ranks, in place.

    Collective over the session, or over `group`. A parameter that got no gradient on some ranks counts as zero there;
    one that got none on any rank keeps none. Half-precision gradients are averaged in float32. Sparse gradients stay
    sparse, coalesced, as new tensors, unless another rank has a dense one; one reduction for each type and device does
    for all others.

    Args:
        parameters: A module, or its parameters in the same order on all ranks; those without requires_grad are not
            looked at.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters.
        PayloadTypeError: A gradient cannot be averaged: of integers or 8-bit floats, or of a class such as DTensor.
        RemoteRankError: Either happened on another rank.
        MismatchError: The ranks' parameters differ in number, shape or type, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> sync_grads(model)
        >>> model.weight.grad
        tensor([[3., 3.]])
    """
    comm = comm_of(group)
    call = Call("sync_grads")
    with torch.no_grad():
        with comm.collective(call):
            trained = [parameter for parameter in _listed(parameters) if parameter.requires_grad]
            mine = [form_of(parameter) for parameter in trained]
            _describe(call, describe_gradients(trained))
            average = dense_means({place: trained[place] for place, form in enumerate(mine) if not form & SPARSE}, comm)
            forms = forms_everywhere(comm, call, mine)()
            # What was prepared is right unless a gradient is sparse on some of the ranks.
            alike = all(form == SPARSE or not form & SPARSE for form in forms)
            finish = average() if alike else None
        if finish is None:
            others = {place: trained[place] for place, form in enumerate(forms) if not form & SPARSE}
            finish = comm.run_prepared(call, lambda: dense_means(others, comm))
        sparse = [parameter for parameter, form in zip(trained, forms, strict=True) if form & SPARSE]
        gathered = gather_sparse(sparse, comm) if sparse else []
        # All that ranks wait for is done: what follows takes memory.
        for place, values in finish().items():
            if forms[place] & DENSE:
                put_gradient(trained[place], values)
        if sparse:
            put_sparse_means(sparse, gathered, comm.size)


def sync_params(module: torch.nn.Module, *, src: int = 0, group: Comm | None = None) -> None:
    """Give every rank the parameters and buffers of one, in place.

    Collective over the session, or over `group`. One broadcast for each type and device.

    Args:
        module: The same on all ranks, but for the values.
        src: The global rank whose values count.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `src` is not a member, or `module` is no module.
        PayloadTypeError: A parameter or buffer has no contents, or is not dense.
        RemoteRankError: Either happened on another rank.
        MismatchError: The ranks' modules differ in names, shapes or types, or another rank calls something else.
        CollectiveError: A rank is gone, or did not come within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import torch
        >>> sync_params(torch.nn.Linear(2, 1))
    """
    comm = comm_of(group)
    call = Call("sync_params")
    with torch.no_grad():
        with comm.collective(call):
            sender = comm.group_rank_of(src, "src")
            call.settings = {"src": comm.ranks[sender]}
            if not isinstance(module, torch.nn.Module):
                raise InvalidArgumentError(f"sync_params takes a module, got {describe(module)}")
            tensors = dict([*module.named_parameters(), *module.named_buffers()])
            buckets = _by_kind(tensors.values())
            flat = [torch.cat([as_bytes(dense(tensor)) for tensor in bucket]) for bucket in buckets]
            moves = [comm.broadcast(data, sender) for data in flat]
            _describe(call, {name: describe(tensor) for name, tensor in tensors.items()})
            comm.verify(call)
            for move in moves:
                move()
        for bucket, data in zip(buckets, flat, strict=True):
            for tensor, values in zip(bucket, data.split([tensor.nbytes for tensor in bucket]), strict=True):
                _put(from_bytes(values, tensor.dtype, tensor.shape), tensor)


def _describe(call: Call, parts: Mapping[str, str]) -> None:
    """Say what has to be the same on all ranks."""
    call.content = " ".join(f"{name}: {part}" for name, part in parts.items())
    call.parts = lambda: parts


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values into a tensor, whose elements may share memory, as those of an expanded mask do."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            values, tensor = values.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    overwrite(tensor, values)


def _listed(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor) and not is_array(parameters):
        listed = list(parameters)
        if all(isinstance(parameter, torch.Tensor) for parameter in listed):
            return listed
    raise InvalidArgumentError(f"sync_grads takes a module or a list of parameters, got {describe(parameters)}")


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split tensors by type and device, which all ranks do alike."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())
