"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


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
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
