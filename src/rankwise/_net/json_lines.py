"""Dataclasses as lines of JSON, which are validated when read: any process can send them to a listening socket.

A field is an int, a float, a bool, a text, bytes, another dataclass, a tuple of one of these ("tuple[int, ...]"), or
one of these or None. A line has all fields of its dataclass and no others: a message of another version is an error.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from rankwise.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_INT_LIMIT: Final = 1 << 63
# The longest line that is read: 64 ranks with deep stacks are 2 MB.
MAX_LINE_BYTES: Final = 1 << 24


def encode_line(value: DataclassInstance) -> str:
    """Return a dataclass as a line."""
    return json.dumps(asdict(value), default=_encode_bytes)


def decode_line(kind: type[T], line: str | bytes) -> T:
    """Return the dataclass in a line, with the control characters in its texts escaped.

    Raises:
        ValueError: The line does not hold such a dataclass.
    """
    return _decode_fields(kind, parse_object(line))


def decode_one_of(kinds: Sequence[type[T]], line: str | bytes) -> T:
    """Return the dataclass in a line: of the kind, among several, whose fields the line has.

    Raises:
        ValueError: The line holds none of them.
    """
    value_by_name = parse_object(line)
    for kind in kinds:
        if value_by_name.keys() == _types(kind).keys():
            return _decode_fields(kind, value_by_name)
    raise ValueError(f"its fields are not those of {' or '.join(kind.__name__ for kind in kinds)}")


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a line.

    Raises:
        ValueError: The line does not hold a JSON object, or is too long.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    try:
        value_by_name = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(value_by_name, dict):
        return value_by_name
    raise ValueError("it is not an object")


def _encode_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a message has a {type(value).__name__}")


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _decode_fields(kind: type[T], value_by_name: dict[str, Any]) -> T:
    types = _types(kind)
    if value_by_name.keys() != types.keys():
        raise ValueError(f"its fields are not those of {kind.__name__}")
    return kind(**{name: _decode(types[name], value, name) for name, value in value_by_name.items()})


def _decode(kind: Any, value: Any, name: str) -> Any:  # noqa: ANN401 - a type, and what JSON has
    """Return the value of a field, or of a part of one.

    Raises:
        ValueError: It is not of that type. A bool is not an int.
    """
    allowed = get_args(kind) if get_origin(kind) is not tuple else (kind,)
    if NoneType in allowed and value is None:
        return None
    (kind,) = (each for each in allowed or (kind,) if each is not NoneType)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return _decode_fields(kind, value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_decode(get_args(kind)[0], each, name) for each in value)
    if kind is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is a {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if kind is int and not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ValueError(f"{name} is out of range")
    return printable(value) if kind is str else value
