"""Whether elements of a tensor, or several tensors, have the same memory, or a part of their memory in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import is_expanded
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import PayloadTypeError


def check_writable(tensor: torch.Tensor, remedy: str = "pass tensor.clone()") -> None:
    """Check that every element of a dense tensor has memory of its own, so that a result can be written into it.

    Args:
        tensor: The tensor.
        remedy: What the error proposes.

    Raises:
        PayloadTypeError: The tensor is expanded, or unfolded.
    """
    if is_expanded(tensor):
        raise PayloadTypeError(f"{describe(tensor)} is expanded or unfolded: elements of it share memory; {remedy}")


def are_disjoint(starts: Sequence[int], ends: Sequence[int]) -> bool:
    """Return whether no two ranges of memory have a byte in common."""
    # Where a range begins, all that began before it have ended.
    return all(map(operator.le, sorted(ends), sorted(starts)[1:]))


def repeated(tensors: Sequence[torch.Tensor], name: Callable[[int], str]) -> dict[int, int]:
    """Return the tensors that have exactly the memory of an earlier one, and that one, by their indices.

    Args:
        tensors: Dense tensors, of whose elements no two share memory.
        name: Returns the name of a tensor for error messages, given its index.

    Raises:
        PayloadTypeError: Two have a part of their memory in common.
    """
    if any(tensor.device.type == DEVICE_TYPE for tensor in tensors):  # where there are values, and no memory
        first_of = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        return {index: first for index, one in enumerate(tensors) if (first := first_of[id(one)]) != index}
    starts = list(map(torch.Tensor.data_ptr, tensors))
    ends = list(map(operator.add, starts, map(_extent, tensors)))
    if are_disjoint(starts, ends):
        return {}
    places: dict[object, int] = {}
    same: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            form = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
            place = (starts[index], tensor.dtype, form, tensor.is_conj(), tensor.is_neg())
            if (first := places.setdefault(place, index)) != index:
                same[index] = first
    _require_disjoint(tensors, sorted((starts[index], ends[index], index) for index in places.values()), name)
    return same


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from the first element of a tensor to the end of the last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _require_disjoint(
    tensors: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int, int]], name: Callable[[int], str]
) -> None:
    """Check ranges of memory, each with the index of its tensor, in the order of their starts."""
    earlier: list[tuple[int, int, int]] = []
    for start, end, index in ranges:
        earlier = [one for one in earlier if one[1] > start]
        for _, _, other in earlier:
            if _have_common_memory(tensors[other], tensors[index]):
                first, second = sorted((other, index))
                raise PayloadTypeError(
                    f"the tensors {name(first)} and {name(second)} have a part of their memory in common, which cannot "
                    "be reduced twice: pass one of them, or copies"
                )
        earlier.append((start, end, index))


def _have_common_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors whose ranges of memory overlap have an element in common."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    start = min(first.data_ptr(), second.data_ptr())
    nbytes = max(tensor.data_ptr() + _extent(tensor) for tensor in (first, second)) - start
    is_used = torch.zeros(nbytes, dtype=torch.bool, device="cpu")
    for tensor in (first, second):
        width = tensor.element_size()
        strides = [stride * width for stride in tensor.stride()]
        own = is_used.as_strided((*tensor.shape, width), (*strides, 1), tensor.data_ptr() - start)
        if own.any():
            return True
        own.fill_(True)
    return False
