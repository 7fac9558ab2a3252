"""Conversion between tensors and bytes, and writing to the memory of tensors."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Final

import torch

from rankwise._torch import has_expanded_view, transformation_test
from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import PayloadTypeError

_is_transformed: Final = transformation_test()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents of a dense tensor as a flat uint8 tensor; no copy if it is contiguous.

    Those of a tensor on an XLA device are on the CPU: there are no bytes on such a device, only values.
    """
    if tensor.device.type == DEVICE_TYPE:
        tensor = tensor.cpu()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1)
    # Zero or one elements are contiguous with any stride, but `view(torch.uint8)` requires a stride of 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def device_of_bytes(own: torch.device, sent: str) -> torch.device:
    """Return the device for the bytes of a tensor from a device of type `sent`, on a rank with another device."""
    return own if sent == own.type != DEVICE_TYPE else torch.device("cpu")


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a dense tensor over these bytes; no copy."""
    return data.view(dtype).reshape(tuple(shape))


def to_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a flat uint8 tensor with a copy of these bytes."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def contents(tensor: torch.Tensor) -> bytes:
    """Return the contents of a flat uint8 tensor, as a copy."""
    return bytes(memory_of(tensor.cpu()))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the CPU; keep the tensor while the memory is used."""
    if not tensor.numel():
        return memoryview(b"")
    address = tensor.data_ptr()
    if not address:  # reading it would crash the process
        raise PayloadTypeError(f"a {type(tensor).__qualname__} has no memory that could be sent")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(address)).cast("B")


def require_memory(tensor: torch.Tensor) -> None:
    """Check that a dense tensor has memory of its own that can be read.

    Raises:
        PayloadTypeError: It is a wrapper of torch.func, its memory was freed, or it never had any.
    """
    if _is_transformed(tensor):
        raise PayloadTypeError("a function that torch.func transforms cannot call collectives: call them outside of it")
    if not tensor.numel() or tensor.device.type == DEVICE_TYPE:
        return
    if not tensor.untyped_storage().nbytes():
        raise PayloadTypeError("the memory of a tensor was freed, as FSDP does between uses; gather its parts first")
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.data_ptr():
        raise PayloadTypeError("a tensor on the CPU has no memory, as the batch sizes of a sequence packed on XLA")


def no_memory_error(operation: str) -> PayloadTypeError:
    """Return the error of a collective that is called where new tensors have no memory."""
    return PayloadTypeError(
        f"{operation} was called under FakeTensorMode, where new tensors have no contents; call it outside"
    )


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the memory of a dense one, hidden from autograd and inference mode.

    On an XLA device, where tensors have values but no memory, with its values.
    """
    if tensor.device.type == DEVICE_TYPE:
        return tensor.clone()
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the one flat tensor that flat tensors are the parts of, one after the other; None if they are not."""
    first = tensors[0]
    ends = list(itertools.accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr()))
    is_one_memory = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    if not is_one_memory or [tensor.data_ptr() for tensor in tensors] != ends[:-1]:
        return None
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a dense tensor share memory, so that it cannot be written to.

    As those of `expand` and `unfold` do. So do, for this function, elements of a dimension that lie between those of
    another one, which only `as_strided` makes.
    """
    if tensor.device.type == DEVICE_TYPE:
        return has_expanded_view(tensor)
    if tensor.is_contiguous():
        return False
    # From the dimension whose elements are next to each other on: how far those before it reach.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of the same shape into a dense tensor, even an inference tensor; autograd sees a new version."""
    target = tensor.detach()
    if target.device.type == DEVICE_TYPE:  # there is no memory to compare or to share
        with torch.inference_mode(target.is_inference()):
            target.copy_(values)
        return
    is_same_memory = values.data_ptr() == target.data_ptr()
    if target.is_inference():
        if not is_same_memory:
            # The memory of a lazily conjugated or negated view holds the values before conjugation or negation.
            values = values.conj() if target.is_conj() else values
            same_memory(target).copy_(-values if target.is_neg() else values)
    elif is_same_memory:
        torch.autograd.graph.increment_version(target)
    else:
        target.copy_(values)
