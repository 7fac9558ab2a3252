"""Collectives of Python objects, and objects serialized to tensors."""

from __future__ import annotations

import math
import pickle
from typing import Any, Final

import torch
from torch import nn

import rankwise
from rankwise import is_joined
from rankwise.compat.vis4d._pickle_semantics import with_pickle_semantics
from rankwise.errors import InvalidArgumentError, NotJoinedError, PayloadTypeError
from rankwise.extend._dropins import bytes_of, tensor_of
from rankwise.extend.collectives import collective, describe

# Backends for tensors on the CPU, and those for tensors on an accelerator.
_CPU_BACKENDS: Final = frozenset({"gloo", "mpi", "ucc"})
_ACCELERATOR_BACKENDS: Final = frozenset({"nccl", "nccl2", "nccl-lazy", "nccl-legacy", "xccl", "hccl"})


class UnsupportedBackendError(InvalidArgumentError, AssertionError):
    """The process group has no backend for whose device this module can make tensors."""


def broadcast(obj: Any, src: int = 0) -> Any:  # noqa: ANN401 - any value
    """Return one rank's value on all ranks; on `src`, and without a session, the same object.

    Collective over the session.

    Raises:
        InvalidArgumentError: There is no rank `src`.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: The value of `src` cannot be pickled; raised on the others.

    Example:
        >>> broadcast({"seed": 7})
        {'seed': 7}
    """
    if not is_joined():
        return obj
    is_source = rankwise.get_rank() == src
    received = rankwise.broadcast(with_pickle_semantics(obj) if is_source else None, src=src)
    return obj if is_source else received


def serialize_to_tensor(data: Any) -> torch.Tensor:  # noqa: ANN401 - any value
    """Return the pickle of a value as a flat uint8 tensor, on a device that the process group supports.

    Local. The device is the CPU if the group has a backend for it.

    Raises:
        NotJoinedError: There is no process group.
        UnsupportedBackendError: It has no backend of the known ones; it is an AssertionError too.
    """
    _require_joined("serialize_to_tensor")
    backend = rankwise.backend()
    backends = {part.rpartition(":")[2].lower() for part in (backend or "").split(",")}
    if backends & _CPU_BACKENDS:
        return obj2tensor(data, torch.device("cpu"))
    if backends & _ACCELERATOR_BACKENDS:
        return obj2tensor(data, rankwise.device())
    raise UnsupportedBackendError(
        f"backend {backend!r} is none of {', '.join(sorted(_CPU_BACKENDS | _ACCELERATOR_BACKENDS))}; "
        "rankwise.all_gather(value) takes any value over any backend"
    )


def pad_to_largest_tensor(tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return every rank's number of elements, and this rank's tensor with zeros up to the largest.

    Collective over the session. A tensor of the largest size is returned itself.

    Raises:
        NotJoinedError: There is no process group.
        InvalidArgumentError: A smaller tensor does not have one dimension; raised on all ranks.
        PayloadTypeError: The value is not a tensor.
        RemoteRankError: The value of another rank is not a tensor.
    """
    _require_joined("pad_to_largest_tensor")
    with collective("pad_to_largest_tensor"):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            raise PayloadTypeError(f"pad_to_largest_tensor takes a tensor, got {describe(tensor)}")
    shapes = rankwise.all_gather(tuple(tensor.shape))
    sizes = [math.prod(shape) for shape in shapes]
    for rank, shape in enumerate(shapes):
        if len(shape) != 1 and sizes[rank] != max(sizes):
            raise InvalidArgumentError(
                f"the tensor of rank {rank} has the shape {list(shape)}, and cannot be padded to the {max(sizes)} "
                "elements of the largest: only a tensor of one dimension can; pass tensor.flatten()"
            )
    missing = max(sizes) - tensor.numel()
    return sizes, nn.functional.pad(tensor, (0, missing)) if missing else tensor


def all_gather_object_gpu(data: Any, rank_zero_return_only: bool = True) -> list[Any] | None:  # noqa: ANN401 - any value
    """Return every rank's value, in the order of ranks: on rank zero, and None elsewhere; or on all ranks.

    Collective over the session. No value is copied to a GPU: accelerators send only tensors that are there.

    Args:
        data: This rank's value.
        rank_zero_return_only: Return the values on rank zero only; the same on all ranks.

    Raises:
        NotJoinedError: There are several ranks, and this process has not joined them.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: The value of another rank cannot be pickled.
        MismatchError: The ranks call different collectives.

    Example:
        >>> all_gather_object_gpu("alone")
        ['alone']
    """
    if rankwise.get_world_size() == 1:
        return [data]
    value = with_pickle_semantics(data)
    return rankwise.gather(value) if rank_zero_return_only else rankwise.all_gather(value)


def all_gather_object_cpu(
    data: Any,  # noqa: ANN401 - any value
    tmpdir: str | None = None,  # noqa: ARG001 - the original's
    rank_zero_return_only: bool = True,
    use_system_tmp: bool = False,  # noqa: ARG001 - the original's
) -> list[Any] | None:
    """Return every rank's value, as `all_gather_object_gpu`.

    Collective over the session. The original writes files; here values are gathered as by all collectives, which is
    faster and needs no file system that ranks share.

    Args:
        data: This rank's value.
        tmpdir: Ignored: neither made nor removed.
        rank_zero_return_only: Return the values on rank zero only; the same on all ranks.
        use_system_tmp: Ignored.

    Raises:
        NotJoinedError: There are several ranks, and this process has not joined them.
        PayloadTypeError: The value cannot be pickled.
        RemoteRankError: The value of another rank cannot be pickled.
        MismatchError: The ranks call different collectives.

    Example:
        >>> all_gather_object_cpu("alone")
        ['alone']
    """
    return all_gather_object_gpu(data, rank_zero_return_only=rank_zero_return_only)


def obj2tensor(pyobj: Any, device: torch.device = torch.device("cuda")) -> torch.Tensor:  # noqa: ANN401, B008 - the original's
    """Return the pickle of a value as a flat uint8 tensor; without CUDA, a CUDA device is replaced by the CPU.

    Local.

    Example:
        >>> tensor2obj(obj2tensor([1, "two"]))
        [1, 'two']
    """
    wanted = torch.device(device)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        wanted = torch.device("cpu")
    return tensor_of(pickle.dumps(pyobj)).to(wanted)


def tensor2obj(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - any value
    """Return the value whose pickle is in a tensor of bytes, the inverse of `obj2tensor`.

    Local.
    """
    return pickle.loads(bytes_of(tensor))


def _require_joined(name: str) -> None:
    if not is_joined():
        raise NotJoinedError(f"{name} is for ranks that have joined others; call rankwise.init() first")
