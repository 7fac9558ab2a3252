"""Dataclasses as lines of JSON, which are validated when read: any process can send them to a listening socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rankwise.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# The accepted types by annotation. A bool is not accepted as an int.
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "str": (str,),
    "bool": (bool,),
}
_INT_LIMIT: Final = 1 << 63


def encode_line(value: DataclassInstance) -> str:
    """Return a dataclass of numbers and strings as a line."""
    return json.dumps(asdict(value))


def decode_line(kind: type[T], line: str | bytes) -> T:
    """Return the dataclass in a line, with the control characters in its strings escaped.

    Raises:
        ValueError: The line does not hold such a dataclass.
    """
    return kind(**decode_fields({field.name: str(field.type) for field in fields(kind)}, line, of=kind))


def decode_fields(types: Mapping[str, str], line: str | bytes, *, of: type) -> dict[str, Any]:
    """Return the fields in a line, with the control characters in strings escaped.

    Args:
        types: Their types by name: "int", "int | None", "str" or "bool".
        line: The line.
        of: Their class, for error messages.

    Raises:
        ValueError: The line does not hold such fields.
    """
    value_by_name = parse_object(line)
    if value_by_name.keys() != types.keys():
        raise ValueError(f"its fields are not those of {of.__name__}")
    for name, value in value_by_name.items():
        if type(value) not in _TYPES[types[name]]:
            raise ValueError(f"{name} is a {type(value).__name__}")
        if isinstance(value, int) and not -_INT_LIMIT <= value < _INT_LIMIT:
            raise ValueError(f"{name} is out of range")
        if isinstance(value, str):
            value_by_name[name] = printable(value)
    return value_by_name


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises:
        ValueError: The line does not hold a JSON object.
    """
    try:
        value_by_name = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(value_by_name, dict):
        return value_by_name
    raise ValueError("it is not an object")
