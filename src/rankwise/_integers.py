"""Integers and bools in arguments: Python's, numpy's and of tensors without dimensions, and never one as the other."""

from __future__ import annotations

import operator
from contextlib import suppress

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


def as_bool(value: object, name: str) -> bool:
    """Return a bool argument as Python's.

    Raises:
        InvalidArgumentError: It is something else, be it as true or false as 1, "" and None.
    """
    if isinstance(value, bool):
        return value
    with suppress(Exception):  # whatever a class raises
        if _is_of_bools(value) and not getattr(value, "ndim", None):
            return bool(value)
    raise InvalidArgumentError(f"{name}={shown(value)}, of type {type(value).__qualname__}, is not True or False")


def _is_of_bools(value: object) -> bool:
    return str(getattr(value, "dtype", "")) in {"bool", "torch.bool"}
