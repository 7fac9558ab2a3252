"""Tensors as bytes, bytes as tensors, and new values in the memory of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from rankwise._torch import is_transformed, makes_fake_tensors
from rankwise.errors import PayloadTypeError


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents of a dense tensor as a flat uint8 tensor; no copy if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1)
    # One element, or none, is contiguous with any stride; a view as bytes wants it to be one.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the dense tensor with these contents; no copy."""
    return data.view(dtype).reshape(tuple(shape))


def to_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a flat uint8 tensor with these contents, a copy."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def contents(tensor: torch.Tensor) -> bytes:
    """Return a flat uint8 tensor's contents."""
    return bytes(memory_of(tensor.cpu()))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous uint8 tensor on the CPU, which must be kept as long as that is used."""
    if not tensor.numel():
        return memoryview(b"")
    address = tensor.data_ptr()
    if not address:  # to read there would end the process
        raise PayloadTypeError(f"a {type(tensor).__qualname__} has no memory that could be sent")
    return memoryview((ctypes.c_char * tensor.numel()).from_address(address)).cast("B")


def require_memory(tensor: torch.Tensor) -> None:
    """Check that a dense tensor has memory of its own that can be read.

    Raises:
        PayloadTypeError: It stands for others, or its memory was freed.
    """
    if is_transformed(tensor):
        raise PayloadTypeError("a function that torch.func transforms cannot call collectives: call them outside of it")
    if not tensor.untyped_storage().nbytes() and tensor.numel():
        raise PayloadTypeError("the memory of a tensor was freed, as FSDP does between uses; gather its parts first")


def require_memory_of_new(operation: str) -> None:
    """Check that tensors which are made now have contents.

    Raises:
        PayloadTypeError: They have none.
    """
    if makes_fake_tensors():
        raise PayloadTypeError(
            f"{operation} was called under FakeTensorMode, where new tensors have no contents; call it outside"
        )


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the memory of a dense one, of which autograd and inference mode know nothing."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a dense tensor are one in memory, so that it cannot be written to."""
    strides = tensor.stride()
    return 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True))


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of its shape into a dense tensor, whatever torch would have in the way, and tell autograd of it."""
    target = tensor.detach()
    is_there = values.data_ptr() == target.data_ptr()
    if target.is_inference():
        if not is_there:
            # A view that stands for the conjugate or the negative has the other in memory.
            values = values.conj() if target.is_conj() else values
            same_memory(target).copy_(-values if target.is_neg() else values)
    elif is_there:
        torch.autograd.graph.increment_version(target)
    else:
        target.copy_(values)
