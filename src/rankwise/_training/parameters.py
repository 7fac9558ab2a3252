"""Synchronization of the parameters and buffers of a module: copies, means, and statistics of batch norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.pytree import describe
from rankwise._collectives.reduce import all_reduce
from rankwise._comm.buffers import as_bytes, from_bytes, is_expanded, overwrite
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call, Move
from rankwise._comm.data.planes import all_of
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group_rank import GroupRank
from rankwise._comm.reduce_ops import HALVES, Op
from rankwise._torch import uncompiled
from rankwise._training.gradients import listed_parameters
from rankwise._training.module_wrappers import refuse_fsdp
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, shown


def sync_params(
    module: torch.nn.Module | Iterable[torch.Tensor],
    *,
    src: int | GroupRank = 0,
    op: str | None = None,
    group: GroupLike | None = None,
) -> None:
    """Copy the parameters and buffers of one rank to all others, in place; or replace them by their means.

    Collective over the session, or over `group`. Makes one operation for each dtype and device.

    An element that is equal on all ranks keeps its bits. Means of half-precision floats are computed in float32.
    Integers, such as the counters of batch norms, get the mean rounded to an integer, half to even, which never
    overflows; bools are copied from `src`.

    Args:
        module: The same module on all ranks, except for the values; it may be compiled, or wrapped by DDP. Or a list
            or an iterator of tensors.
        src: The global rank whose values are copied, or a `GroupRank`.
        op: "mean" for means; None to copy.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `src` is not a member, `op` is another one, or `module` is neither of these, or has a
            module of FSDP in it.
        PayloadTypeError: A parameter or buffer has no contents, is not dense, or has no mean.
        RemoteRankError: One of these errors occurred on another rank.
        MismatchError: The modules differ in names, shapes or dtypes, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)  # initialized at random, differently on each rank
        >>> sync_params(model)  # now the same on all ranks
        >>> sync_params(model, op="mean")  # as after some steps on each rank alone
    """
    comm = comm_of(group)
    with torch.no_grad():
        with comm.call("sync_params") as call:
            sender = comm.group_rank_of(src, "src")
            if op is not None and not (isinstance(op, str) and op == "mean"):
                raise InvalidArgumentError(f"op={shown(op)} is neither 'mean' nor None, to copy")
            call.settings = {"src": comm.ranks[sender], **({} if op is None else {"op": op})}
            if isinstance(module, torch.nn.Module):
                refuse_fsdp(module, "sync_params")
                tensors = named_tensors(module)
            else:
                listed = listed_parameters(module, "sync_params")
                tensors = {f"parameter {index}": tensor for index, tensor in enumerate(listed)}
            kinds = [_SameKind(same) for same in _by_kind(tensors.values())]
            moves = [kind.copy(comm, sender) if kind.is_copied(op) else kind.mean(comm) for kind in kinds]
            _describe(call, {name: describe(tensor) for name, tensor in tensors.items()})
            call.verify()
            for move in moves:
                move()
            floats = [kind for kind in kinds if op is not None and kind.is_float]
            if floats:
                call.run_prepared(lambda: all_of([kind.mean_around_copy(comm) for kind in floats]))
        for kind in kinds:
            kind.store()


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, with the names that they have without `torch.compile`."""
    module = uncompiled(module)
    return dict([*module.named_parameters(), *module.named_buffers()])


class _SameKind:
    """Tensors of one dtype on one device, which get new values together.

    Attributes:
        is_float: They are floats, or complex numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._dtype = tensors[0].dtype
        self.is_float = self._dtype.is_floating_point or self._dtype.is_complex
        self._values: Callable[[], torch.Tensor] = self._flat

    def is_copied(self, op: str | None) -> bool:
        """Return whether the values of one member are needed: as they are, or to average the differences from them."""
        return op is None or self._dtype == torch.bool or self.is_float

    def copy(self, comm: Comm, src: int) -> Move:
        """Prepare to get the values of one member."""
        data = torch.cat([as_bytes(dense(tensor)) for tensor in self._tensors])
        self._values = lambda: from_bytes(data, self._dtype, (-1,))
        return comm.planes.broadcast(data, src)

    def mean(self, comm: Comm) -> Move:
        """Prepare to get the means of integers."""
        reduction = comm.planes.all_reduce(self._flat(), Op.MEAN)
        self._values = lambda: _rounded(reduction.finish(), self._dtype)
        return reduction.run

    def mean_around_copy(self, comm: Comm) -> Move:
        """Prepare to get the means of floats or complex numbers, after a copy of the values of one member.

        They are these values and the means of the differences from them: exact where all members have the same.
        """
        own = self._flat()
        reference = self._values().to(own.device)  # the bytes of tensors on XLA devices are on the CPU
        if self._dtype in HALVES:
            own, reference = own.float(), reference.float()
        # The difference of equal infinities is no number.
        reduction = comm.planes.all_reduce((own - reference).masked_fill_(own == reference, 0), Op.MEAN)
        self._values = lambda: (reference + reduction.finish()).to(self._dtype)
        return reduction.run

    def store(self) -> None:
        """Write the new values into the tensors."""
        parts = self._values().split([tensor.numel() for tensor in self._tensors])
        for tensor, values in zip(self._tensors, parts, strict=True):
            _put(values.view(tensor.shape), tensor)

    def _flat(self) -> torch.Tensor:
        return torch.cat([dense(tensor).reshape(-1) for tensor in self._tensors])


def sync_buffers(module: torch.nn.Module, *, group: GroupLike | None = None) -> None:
    """Combine the statistics of batch norms that the ranks have collected apart, and average all other buffers.

    Collective over the session, or over `group`. Parameters stay as they are. A running variance becomes that of the
    samples of all ranks: the mean of the variances, and the variance of the means (torch.nn.SyncBatchNorm computes the
    same in each step). All ranks count alike, however many samples they have seen. Other buffers become their means, as
    by `sync_params(op="mean")`.

    Args:
        module: The same module on all ranks, except for the values. It may be compiled, or wrapped by DDP.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        InvalidArgumentError: `module` is not a module, or has one of FSDP in it.
        RemoteRankError: An error occurred on another rank.
        MismatchError: The modules differ in their buffers, or another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> sync_buffers(model)  # before an evaluation, or a checkpoint
    """
    comm = comm_of(group)
    with torch.no_grad():
        with comm.call("sync_buffers"):
            if not isinstance(module, torch.nn.Module):
                raise InvalidArgumentError(f"sync_buffers takes a module, got {describe(module)}")
            refuse_fsdp(module, "sync_buffers")
            norms = {
                name: part
                for name, part in uncompiled(module).named_modules()
                if isinstance(getattr(part, "running_mean", None), torch.Tensor)
                and isinstance(getattr(part, "running_var", None), torch.Tensor)
            }
            # In float64, and on the CPU, since some accelerators have none: the buffers are short.
            parts: dict[str, tuple[Any, Any]] = {
                name: (norm.running_mean.cpu().double(), norm.running_var.cpu().double())
                for name, norm in norms.items()
            }
        moments = all_reduce(
            {name: (mean, var, mean * mean) for name, (mean, var) in parts.items()}, "mean", group=group
        )
        pooled = {id(norm.running_var): name for name, norm in norms.items()}
        others = {name: buffer for name, buffer in named_tensors(module).items() if id(buffer) not in pooled}
        parameters = dict(uncompiled(module).named_parameters())
        sync_params([buffer for name, buffer in others.items() if name not in parameters], op="mean", group=group)
        for name, norm in norms.items():
            mean, var, square = moments[name]
            overwrite(norm.running_var, (var + (square - mean * mean).clamp_(min=0)).to(norm.running_var))


def _rounded(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return means in float64 as integers: the largest that fit, where rounding has left the range of the dtype."""
    limits, rounded = torch.iinfo(dtype), mean.round()
    in_range = rounded.clamp(float(limits.min), float(limits.max))
    # float64 has no largest int64: it rounds up to 2**63.
    return torch.where(in_range >= float(limits.max), limits.max, in_range.where(in_range < limits.max, 0.0).to(dtype))


def _describe(call: Call, parts: Mapping[str, str]) -> None:
    """Put the description of parameters or buffers into the call; it has to be the same on all ranks."""
    call.content = " ".join(f"{name}: {part}" for name, part in parts.items())
    call.parts = lambda: parts


def _put(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy values into a tensor, whose elements may share memory, as those of an expanded tensor do."""
    if tensor.device.type == DEVICE_TYPE and is_expanded(tensor):  # a copy to it adds its elements up
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = values.to(tensor.device)
        return
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
