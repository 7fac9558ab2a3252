"""numpy's arrays as tensors, and tensors as arrays. numpy is not imported: whoever has an array has imported it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rankwise.errors import PayloadTypeError


def is_array(value: object) -> bool:
    """Return whether a value is an array of numpy's, or of a class made from it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def tensor_of(array: Any) -> torch.Tensor:  # noqa: ANN401 - numpy may not be installed
    """Return a tensor with an array's contents, in the array's memory if that is possible.

    Raises:
        PayloadTypeError: Tensors do not have its type, or it is of a class that has more than its contents, as masked
            arrays do.
    """
    kind = type(array)
    if kind.__name__ not in {"ndarray", "memmap"}:
        raise PayloadTypeError(f"a {kind.__qualname__} is more than an array of numbers; pass numpy.asarray(value)")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.carray else array.copy(order="C"))
    except TypeError as error:
        raise PayloadTypeError(
            f"an array of {array.dtype} cannot be reduced; convert it, as in array.astype(float)"
        ) from error


def array_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - an array
    """Return the array in the memory of a tensor of the CPU."""
    return tensor.numpy()
