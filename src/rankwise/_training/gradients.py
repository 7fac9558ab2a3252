"""Synchronization of gradients and parameters, without a wrapper around the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import as_bytes, from_bytes, overwrite
from rankwise._comm.control.protocol import Call
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group_rank import GroupRank
from rankwise._training.gradient_averaging import (
    DENSE,
    SPARSE,
    combine_layouts,
    dense_means,
    describe_gradients,
    gather_sparse,
    layout_bit,
    set_gradient,
    set_sparse_means,
)
from rankwise.errors import InvalidArgumentError


def sync_grads(parameters: torch.nn.Module | Iterable[torch.Tensor], *, group: GroupLike | None = None) -> None:
    """Replace every gradient by its mean over all ranks, in place.

    Collective over the session, or over `group`. A missing gradient counts as zero, but remains missing if no rank has
    one. Half-precision gradients are averaged in float32. Sparse gradients are replaced by new, coalesced sparse
    tensors, unless another rank has a dense gradient. All other gradients are averaged by one reduction for each dtype
    and device. On XLA devices all that is pending is started first, in a graph of its own, and then the reduction; the
    call does not wait for either.

    Args:
        parameters: A module, or its parameters in the same order on all ranks; those without requires_grad are ignored.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `parameters` is neither a module nor parameters.
        PayloadTypeError: A gradient cannot be averaged: it is of integers or 8-bit floats, or a DTensor, for example.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The parameters differ in number, shape or dtype, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
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
            trained = [parameter for parameter in _listed(parameters) if parameter.requires_grad]
            layouts = [layout_bit(parameter) for parameter in trained]
            _describe(call, describe_gradients(trained))
            # The reduction is prepared before the ranks agree, since it allocates memory, which can fail on one rank.
            # It is right unless a gradient is sparse on some ranks and not on others; then it is prepared once more.
            local_dense = {index: trained[index] for index, layout in enumerate(layouts) if not layout & SPARSE}
            average = dense_means(local_dense, comm)
            combined = combine_layouts(comm, call, layouts)()
            is_uniform = all(layout == SPARSE or not layout & SPARSE for layout in combined)
            finish = average() if is_uniform else None
            if finish is None:
                others = {index: trained[index] for index, layout in enumerate(combined) if not layout & SPARSE}
                finish = comm.run_prepared(call, lambda: dense_means(others, comm))
        sparse = [parameter for parameter, layout in zip(trained, combined, strict=True) if layout & SPARSE]
        gathered = gather_sparse(sparse, comm) if sparse else []
        # From here on no other rank waits for this one, so that allocations may fail on this rank alone.
        for index, values in finish().items():
            if combined[index] & DENSE:
                set_gradient(trained[index], values)
        if sparse:
            set_sparse_means(sparse, gathered, comm.size)


def sync_params(module: torch.nn.Module, *, src: int | GroupRank = 0, group: GroupLike | None = None) -> None:
    """Copy the parameters and buffers of one rank to all others, in place.

    Collective over the session, or over `group`. Makes one broadcast for each dtype and device.

    Args:
        module: The same module on all ranks, except for the values.
        src: The global rank whose values are copied, or a `GroupRank`.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `src` is not a member, or `module` is not a module.
        PayloadTypeError: A parameter or buffer has no contents, or is not dense.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The modules differ in names, shapes or dtypes, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)  # initialized at random, differently on each rank
        >>> sync_params(model)  # now the same on all ranks
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
    """Put the description of parameters or buffers into the call; it has to be the same on all ranks."""
    call.content = " ".join(f"{name}: {part}" for name, part in parts.items())
    call.parts = lambda: parts


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values into a tensor, whose elements may share memory, as those of an expanded tensor do."""
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
    """Group tensors by dtype and device; the groups are in the same order on all ranks."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())
