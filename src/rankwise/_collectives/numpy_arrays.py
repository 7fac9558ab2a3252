"""Conversion between numpy arrays and tensors. numpy is not imported here: a program with arrays has imported it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rankwise.errors import PayloadTypeError


def is_array(value: object) -> bool:
    """Return whether a value is a numpy array, or an instance of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def tensor_from_array(array: Any) -> torch.Tensor:  # noqa: ANN401 - numpy may not be installed
    """Return a tensor with the contents of an array; the two share memory if that is possible.

    Raises:
        PayloadTypeError: No tensor has its dtype, or its class has more than contents, as a masked array.
    """
    array_type = type(array)
    if array_type.__name__ not in {"ndarray", "memmap"}:
        raise PayloadTypeError(
            f"a {array_type.__qualname__} is more than an array of numbers; pass numpy.asarray(value)"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.carray else array.copy(order="C"))
    except TypeError as error:
        raise PayloadTypeError(
            f"an array of {array.dtype} cannot be reduced; convert it, as in array.astype(float)"
        ) from error


def array_from_tensor(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - an array
    """Return an array that shares the memory of a CPU tensor."""
    return tensor.numpy()
