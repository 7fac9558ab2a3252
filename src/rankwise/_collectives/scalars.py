"""Reduction of Python numbers: exact, as in Python, and with the same result on every rank."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from rankwise._comm.comm import Comm
from rankwise._comm.reduce_ops import Op
from rankwise.errors import PayloadTypeError, shown

Number = bool | int | float | complex

# From the narrowest to the widest.
NUMBER_TYPES: Final = (bool, int, float, complex)
_DTYPES: Final = (torch.bool, torch.int64, torch.float64, torch.complex128)
_INT64_BITS: Final = 63


def to_python_number(value: Any, op: Op) -> Any:  # noqa: ANN401 - any value of the user's
    """Return a number as a Python number, after checking that an operation is defined for it.

    numpy scalars are converted, since they overflow, and numpy's bool is not a Python bool.

    Raises:
        PayloadTypeError: The operation is not defined for the value, or the value is not a number.
    """
    number_type = type(value)
    if number_type is float and not op.bools_only:
        return value
    if number_type not in NUMBER_TYPES:
        value = _as_python(value)
    if op.bools_only and not isinstance(value, bool):
        raise PayloadTypeError(f"op={op.name!r} is for bools, got {shown(value)}; compare first, as in value != 0")
    if op.is_mean and isinstance(value, int) and abs(value) > sys.float_info.max:
        raise PayloadTypeError(
            "op='mean' of an integer beyond the range of floats has no result, since a mean is a float"
        )
    if op.absorbing is not None and isinstance(value, complex):
        raise PayloadTypeError(f"op={op.name!r} is not defined for {shown(value)}: complex numbers have no order")
    return value


def fold_numbers(rows: Sequence[Sequence[Number]], op: Op) -> list[Any]:
    """Reduce numbers column by column; there is one row for each rank, in the order of ranks."""
    return [_fold(column, op) for column in zip(*rows, strict=True)]


def all_reduce_numbers(comm: Comm, numbers: Sequence[Number], op: Op) -> Callable[[], list[Any]]:
    """Reduce numbers in a group without frames, and return a function that returns the results.

    Collective over the members. The cost does not grow with the number of ranks: the backend reduces numbers as tensors
    of 64-bit types. Only if a result may exceed 64-bit integers are the numbers gathered. The returned function then
    reduces them in Python, and raises the same error on all ranks if they have no result.
    """
    bits = max((number.bit_length() for number in numbers if isinstance(number, int)), default=0)
    device = comm.planes.message_device
    widest = torch.tensor([bits, *(NUMBER_TYPES.index(type(number)) for number in numbers)], device=device)
    comm.planes.reduce(widest, Op.MAX)()
    bits, *types = widest.tolist()
    if op.result_bits(bits, comm.size) >= _INT64_BITS:
        rows = [pickle.loads(row) for row in comm.control.digests.all_gather(pickle.dumps(numbers))]
        return functools.partial(fold_numbers, rows, op)

    results: list[Any] = [None] * len(numbers)
    for type_index in sorted(set(types)):
        indices = [index for index, other in enumerate(types) if other == type_index]
        widen: Callable[[Any], Any] = NUMBER_TYPES[type_index]
        values = [widen(numbers[index]) for index in indices]
        wire = torch.tensor(values, dtype=_DTYPES[type_index], device=device)
        reduction = comm.planes.all_reduce(wire, Op.SUM if op.is_mean else op)
        reduction.run()
        reduced = reduction.finish().tolist()
        for index, value in zip(indices, reduced, strict=True):
            results[index] = value / comm.size if op.is_mean else value
    return lambda: results


def _as_python(value: Any) -> Any:  # noqa: ANN401 - any value of the user's
    """Convert numpy scalars, and instances of subclasses of the number types, to Python numbers."""
    own = type(value)
    if hasattr(own, "item") and hasattr(own, "ndim") and not value.ndim:
        value = value.item()
    number_type = next((candidate for candidate in NUMBER_TYPES if isinstance(value, candidate)), None)
    if number_type is None:
        raise PayloadTypeError(
            f"a reduction takes tensors, numbers, arrays and containers of them, got a {own.__qualname__}"
        )
    return number_type(value)


def _fold(column: Sequence[Any], op: Op) -> Any:  # noqa: ANN401 - numbers of any type
    types = set(map(type, column))
    if len(types) > 1:
        widest = max(types, key=NUMBER_TYPES.index)
        try:
            column = [widest(number) for number in column]
        except OverflowError as error:  # the same on all ranks
            raise PayloadTypeError(
                "an integer of one rank is beyond the range of floats, and another rank has a float"
            ) from error
    return op.reduce_numbers(column)
