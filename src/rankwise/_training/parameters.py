"""Synchronization of the parameters and buffers of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import as_bytes, from_bytes, overwrite
from rankwise._comm.control.protocol import Call
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group_rank import GroupRank
from rankwise.errors import InvalidArgumentError


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


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype and device; the groups are in the same order on all ranks."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())
