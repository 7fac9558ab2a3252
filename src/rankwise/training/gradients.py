"""Gradients and parameters: the same on all ranks, without a wrapper around the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rankwise.collectives.groups import comm_of
from rankwise.collectives.trees import describe
from rankwise.comm.comm import Comm, dense
from rankwise.comm.frame import Call
from rankwise.comm.ops import Op
from rankwise.errors import InvalidArgumentError


def sync_grads(parameters: torch.nn.Module | Iterable[torch.Tensor], *, group: Comm | None = None) -> None:
    """Replace every gradient by its mean over all ranks, in place.

    Collective over the session, or over `group`. A parameter that got no gradient on some ranks counts as zero there;
    one that got none on any rank keeps none. Half-precision gradients are averaged in float32, sparse ones become
    dense. One reduction for each type and device.

    Args:
        parameters: A module, or its parameters in the same order on all ranks; those without requires_grad are not
            looked at.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters.
        RemoteRankError: That happened on another rank.
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
    with comm.taking_part(call), torch.no_grad():
        trained = [parameter for parameter in _listed(parameters) if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        _agree_on(call, {f"parameter {place}": parameter for place, parameter in enumerate(trained)}, comm)
        for bucket in _by_kind(trained):
            _average(bucket, comm)


def sync_params(module: torch.nn.Module, *, src: int = 0, group: Comm | None = None) -> None:
    """Give every rank the parameters and buffers of one, in place.

    Collective over the session, or over `group`. One broadcast for each type and device.

    Args:
        module: The same on all ranks, but for the values.
        src: The global rank whose values count.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: `src` is not a member.
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
    call = Call("sync_params", {"src": src})
    with comm.taking_part(call), torch.no_grad():
        sender = comm.place_of(src, "src")
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        for tensor in tensors.values():
            dense(tensor)
        _agree_on(call, tensors, comm)
        for bucket in _by_kind(tensors.values()):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            comm.broadcast(flat.view(torch.uint8), sender)
            for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                _put(values.view_as(tensor), tensor)


def _agree_on(call: Call, tensors: Mapping[str, torch.Tensor], comm: Comm) -> None:
    """Wait until all ranks are here, with tensors of the same names, shapes and types."""
    call.content = " ".join(f"{name}: {describe(tensor)}" for name, tensor in tensors.items())
    call.parts = lambda: {name: describe(tensor) for name, tensor in tensors.items()}
    if comm.check or all(tensor.device.type == "cpu" for tensor in tensors.values()):
        comm.agree(call)


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values into a tensor, whose elements may share memory, as those of an expanded mask do."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            values, tensor = values.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    tensor.copy_(values)


def _listed(parameters: torch.nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.nn.Module):
        return list(parameters.parameters())
    listed = [] if isinstance(parameters, torch.Tensor) else list(parameters)
    if isinstance(parameters, torch.Tensor) or not all(isinstance(parameter, torch.Tensor) for parameter in listed):
        raise InvalidArgumentError("sync_grads takes a module or a list of parameters")
    return listed


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split tensors by type and device, which all ranks do alike."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())


def _average(bucket: list[torch.Tensor], comm: Comm) -> None:
    """Average the gradients of parameters of one kind, in one reduction.

    Behind the gradients travels one number for each parameter, which is above zero if any rank had a gradient: so
    nothing depends on what this rank alone knows, and no rank can be left waiting.
    """
    present = torch.tensor([parameter.grad is not None for parameter in bucket], device="cpu")
    grads = [parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in bucket]
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), present.to(grads[0])])
    reduced = comm.all_reduce(flat, Op.MEAN)
    *averaged, counts = reduced.split([*(grad.numel() for grad in grads), len(bucket)])
    for parameter, values, count in zip(bucket, averaged, counts.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view_as(parameter))
