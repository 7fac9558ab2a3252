"""Tables that are one test: every row is checked, and every failure reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from tests.tables import each_row


def test_all_rows_that_fail_are_reported() -> None:
    seen = []

    @each_row("letter", "ab")
    @each_row(("number", "wanted"), [(1, 1), (2, 3), (4, 5)], ids=["one", "two", "four"])
    def check(fixture: str, letter: str, number: int, wanted: int) -> None:
        seen.append((letter, number))
        assert number == wanted, fixture

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(fixture="shown")
    assert seen == [(letter, number) for letter in "ab" for number in (1, 2, 4)]
    for text in ("2 of 2 rows failed", "['a']", "['b']", "2 of 3 rows failed", "[two]", "[four]", "shown"):
        assert text in str(caught.value)
    assert "[one]" not in str(caught.value)


def test_after_a_failure_in_a_collective_no_row_follows(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    @each_row("number", [1, 2, 3], collective=True)
    def check(number: int) -> None:
        seen.append(number)
        assert number < 2

    with pytest.raises(AssertionError):
        check()
    assert seen == [1, 2]
    assert capsys.readouterr().out == "the row [2] failed\n"


def test_a_table_that_checks_nothing_is_refused() -> None:
    def check(number: int) -> None:
        """Take anything."""

    refused: list[Callable[[], object]] = [lambda: each_row("number", []), lambda: each_row("other", [1])(check)]
    for call in refused:
        with pytest.raises(ValueError, match=r"is empty|does not take"):
            call()
