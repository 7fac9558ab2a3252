"""Which values an argument takes: integers, bools, durations and texts.

Integers and bools are Python's, numpy's and those of tensors without dimensions; a bool is never taken as an integer,
nor an integer as a bool.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from numbers import Real

from rankwise.errors import InvalidArgumentError, shown


def integer(value: object) -> int | None:
    """Return an integer as Python's; None for anything else, bools included.

    Example:
        >>> integer(3), integer(True), integer(3.0), integer("3")
        (3, None, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    try:
        if _is_of_bools(value) or getattr(value, "ndim", None):
            return None
        return operator.index(value)  # type: ignore[arg-type]  # raises for other types
    except Exception:  # noqa: BLE001 - any error of a class that is not an integer; meta tensors raise RuntimeError
        return None


def as_integer(value: object, name: str) -> int:
    """Return an integer argument as Python's.

    Raises:
        InvalidArgumentError: It is not an integer, or is a bool; the message has the `name` of the argument.
    """
    found = integer(value)
    if found is None:
        raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not an integer")
    return found


def as_bool(value: object, name: str) -> bool:
    """Return a bool argument as Python's.

    Raises:
        InvalidArgumentError: It is not a bool; values such as 1, "" and None are not converted.
    """
    if isinstance(value, bool):
        return value
    with suppress(Exception):  # any error of a class that is not a bool
        if _is_of_bools(value) and not getattr(value, "ndim", None):
            return bool(value)
    raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not True or False")


def as_seconds(value: object, name: str, *, most: float | None = None) -> float:
    """Return a duration in seconds as a float.

    Args:
        value: Any real number above 0, numpy's included.
        name: The name of the argument, for the message.
        most: The longest possible; infinity is possible without it.

    Raises:
        InvalidArgumentError: It is not a number, not above 0, or too large.

    Example:
        >>> as_seconds(5, "timeout")
        5.0
    """
    if integer(value) is not None or (isinstance(value, Real) and not isinstance(value, bool)):
        try:
            seconds = float(value)  # type: ignore[arg-type]  # a number is one
        except OverflowError:  # an integer beyond all floats
            seconds = 0.0
        if seconds > 0 and (most is None or seconds <= most):
            return seconds
    limits = "above 0" if most is None else f"above 0, and {most:g} at most"
    raise InvalidArgumentError(f"{name}={shown(value)} is not a number of seconds {limits}")


def as_text(value: object, name: str) -> str:
    """Return an argument that is a string.

    Raises:
        InvalidArgumentError: It is not a string; the message has the `name` of the argument.

    Example:
        >>> as_text("epoch 1", "name")
        'epoch 1'
    """
    if isinstance(value, str):
        return str(value)
    raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not a string")


def _is_of_bools(value: object) -> bool:
    return str(getattr(value, "dtype", "")) in {"bool", "torch.bool"}
