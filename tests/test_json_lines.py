"""Messages as lines of JSON: what comes back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from rankwise._net.json_lines import MAX_LINE_BYTES, decode_line, decode_one_of, encode_line
from tests.tables import each_row


@dataclass(frozen=True)
class Part:
    text: str
    data: bytes = b""


@dataclass(frozen=True)
class Whole:
    number: int
    seconds: float | None
    is_there: bool
    parts: tuple[Part, ...]
    names: tuple[str, ...] | None
    last: Part | None


WHOLE = Whole(3, 1.5, is_there=True, parts=(Part("a", b"\0\xff"), Part("ü")), names=("x",), last=None)


def test_a_message_comes_back() -> None:
    for value in (WHOLE, Whole(-1, None, is_there=False, parts=(), names=None, last=Part("\n\t"))):
        line = encode_line(value)
        assert "\n" not in line
        assert decode_line(Whole, line.encode()) == value


def test_a_line_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 16777216 bytes"):
        decode_line(Part, encode_line(Part("a" * MAX_LINE_BYTES)))


def test_the_kind_of_a_message_is_that_of_its_fields() -> None:
    for value in (WHOLE, Part("a")):
        assert decode_one_of((Whole, Part), encode_line(value)) == value
    for line in ('{"text": "a"}', '{"text": 1, "data": ""}', "[]"):
        with pytest.raises(ValueError, match=r"Whole or Part|is a int|not an object"):
            decode_one_of((Whole, Part), line)


def test_control_characters_are_escaped_at_any_depth() -> None:
    sent = Whole(0, None, is_there=True, parts=(Part("\x1b[2J"),), names=("\x07",), last=None)
    received = decode_line(Whole, encode_line(sent))
    assert (received.parts[0].text, received.names) == ("\\x1b[2J", ("\\x07",))


@each_row(
    ("field", "value", "problem"),
    [
        ("number", True, "number is a bool"), ("number", 1.0, "number is a float"), ("number", 1 << 63, "out of range"),
        ("number", None, "number is a NoneType"), ("seconds", "1", "seconds is a str"), ("seconds", True, "a bool"),
        ("seconds", float("nan"), "seconds is nan"), ("is_there", 1, "is_there is a int"), ("parts", {}, "a dict"),
        ("parts", [1], "parts is a int"), ("parts", [{}], "its fields are not those of Part"),
        ("parts", [{"text": "", "data": "?"}], "."), ("parts", [{"text": "", "data": "", "more": 1}], "its fields"),
        ("names", [None], "names is a NoneType"), ("names", "x", "names is a str"), ("last", [], "last is a list"),
    ],
)  # fmt: skip
def test_other_messages_are_refused(field: str, value: Any, problem: str) -> None:
    line = json.dumps({**json.loads(encode_line(WHOLE)), field: value})
    with pytest.raises(ValueError, match=problem):
        decode_line(Whole, line)


@each_row("line", ["", "[]", "3", "{}", "{" * 100_000, "[" * 100_000, b"\xff", '{"number": 1}'])
def test_other_lines_are_refused(line: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_line(Whole, line)
