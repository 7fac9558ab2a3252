"""What ranks say to each other before they know each other: values as lines of JSON, read with distrust."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rankwise.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# By annotation. A bool is no int here.
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "int | None": (int, NoneType),
    "str": (str,),
    "bool": (bool,),
}
_MOST: Final = 1 << 63


def encode_line(value: DataclassInstance) -> str:
    """Return a value of numbers and texts as a line."""
    return json.dumps(asdict(value))


def decode_line(kind: type[T], line: str | bytes) -> T:
    """Return the value in a line, its texts without what a terminal might obey.

    Raises:
        ValueError: The line is none of such a value.
    """
    said = fields_of(line)
    expected = {field.name: str(field.type) for field in fields(kind)}
    if said.keys() != expected.keys():
        raise ValueError(f"its fields are not those of {kind.__name__}")
    for name, value in said.items():
        if type(value) not in _TYPES[expected[name]]:
            raise ValueError(f"{name} is a {type(value).__name__}")
        if isinstance(value, int) and not -_MOST <= value < _MOST:
            raise ValueError(f"{name} is out of range")
        if isinstance(value, str):
            said[name] = printable(value)
    return kind(**said)


def fields_of(line: str | bytes) -> dict[str, Any]:
    """Return the fields of the object in a line.

    Raises:
        ValueError: There is none.
    """
    try:
        said = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(said, dict):
        return said
    raise ValueError("it is no object")
