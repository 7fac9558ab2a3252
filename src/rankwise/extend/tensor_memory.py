"""The memory of tensors in collectives: as bytes, and with results written into it."""

from __future__ import annotations

from rankwise._comm.buffers import contents as bytes_of
from rankwise._comm.buffers import overwrite
from rankwise._comm.buffers import to_tensor as tensor_of

__all__ = ["bytes_of", "overwrite", "tensor_of"]
