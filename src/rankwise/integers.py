"""Integers in arguments: Python's and numpy's, and those of tensors without dimensions, but no bools."""

from __future__ import annotations

import operator

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
    is_bool = str(getattr(value, "dtype", "")) == "torch.bool"
    if is_bool or getattr(value, "ndim", None):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # which is what is to be found out
    except Exception:  # noqa: BLE001 - whatever a class raises that is no integer; meta tensors a RuntimeError
        return None


def as_integer(value: object, name: str) -> int:
    """Return an integer argument as Python's.

    Raises:
        InvalidArgumentError: It is no integer, or a bool; `name` names the argument in the message.
    """
    found = integer(value)
    if found is None:
        raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not an integer")
    return found
