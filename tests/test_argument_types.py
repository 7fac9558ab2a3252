"""Integers in arguments: numpy's and tensors' as well, bools never."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
import torch

from rankwise._arguments import as_bool, as_integer, integer
from rankwise.errors import InvalidArgumentError
from tests.tables import each_row


class Level(IntEnum):
    HIGH = 3


class Raising:
    def __index__(self) -> int:
        raise KeyError("index")

    def __repr__(self) -> str:
        raise KeyError("repr")


@each_row("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), Level.HIGH])
def test_integers_of_all_kinds_are_pythons(value: object) -> None:
    found = as_integer(value, "n")
    assert type(found) is int
    assert found == 3


NO_INTEGERS: list[Callable[[], object]] = [
    lambda: None,
    lambda: True,
    lambda: np.True_,
    lambda: np.array(True),
    lambda: torch.tensor(True),
    lambda: "3",
    lambda: b"3",
    lambda: 3.0,
    lambda: np.float64(3),
    lambda: Fraction(3),
    lambda: [3],
    lambda: torch.tensor([3]),
    lambda: torch.tensor(3, device="meta"),
    lambda: int,
    Raising,
]


@each_row("make", NO_INTEGERS)
def test_what_is_no_integer_is_refused(make: Callable[[], object]) -> None:
    value = make()
    assert integer(value) is None
    with pytest.raises(InvalidArgumentError, match=r"^n=.* is not an integer$"):
        as_integer(value, "n")


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), torch.tensor(True)])
def test_bools_of_all_kinds_are_pythons(value: object) -> None:
    assert as_bool(value, "flag") is True


@each_row("value", [None, 1, 0, "", "False", [], torch.tensor(1), np.array([True]), int, Raising()])
def test_what_is_as_good_as_a_bool_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^flag=.* is not True or False$"):
        as_bool(value, "flag")
