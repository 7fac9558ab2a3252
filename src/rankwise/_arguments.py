"""Durations and texts in arguments. Integers and bools are in `integers`."""

from __future__ import annotations

from numbers import Real

from rankwise._integers import integer
from rankwise.errors import InvalidArgumentError, shown


def as_seconds(value: object, name: str, *, most: float | None = None) -> float:
    """Return a duration in seconds as a float.

    Args:
        value: Any real number above 0, numpy's included.
        name: Names the argument in the message.
        most: The longest possible; infinity is possible without it.

    Raises:
        InvalidArgumentError: It is no number, not above 0, or too large.

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
        InvalidArgumentError: It is something else; `name` names the argument.

    Example:
        >>> as_text("epoch 1", "name")
        'epoch 1'
    """
    if isinstance(value, str):
        return str(value)
    raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not a string")
