"""Reduction of Python numbers: exact, as in Python, and with the same result on every rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from rankwise._comm.reduce_ops import Op
from rankwise.errors import PayloadTypeError, shown

Number = bool | int | float | complex

# From the narrowest to the widest.
NUMBER_TYPES: Final = (bool, int, float, complex)


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
