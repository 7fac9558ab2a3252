"""Tests that are skipped, or expected to fail."""

from __future__ import annotations

import pytest
import torch

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(3)


@pytest.mark.skip(reason="by a marker")
def test_marked() -> None:
    raise AssertionError


def test_everywhere(world: Session) -> None:
    pytest.skip("on all")


def test_on_one_rank(world: Session) -> None:
    if world.rank == 1:
        pytest.skip("on one")


@pytest.fixture
def unwilling(world: Session) -> None:
    if world.rank == 2:
        pytest.skip("in a fixture")


def test_in_a_fixture(unwilling: None) -> None:
    raise AssertionError("no rank runs the body")


@pytest.mark.xfail(reason="known", strict=True)
def test_expected_on_one_rank(world: Session) -> None:
    assert world.rank != 1


@pytest.mark.xfail(raises=ValueError)
def test_expected_while_others_wait(world: Session) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    rw.all_reduce(torch.ones(1))


@pytest.mark.xfail
def test_unexpectedly_passed(world: Session) -> None:
    pass


def test_imperative(world: Session) -> None:
    pytest.xfail("by a call")
