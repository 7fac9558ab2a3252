"""Tests that fail at first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)


class OwnError(Exception):
    """One that other processes find by name."""


def attempt(world: Session, name: str) -> int:
    """Return how many attempts there were."""
    file = Path(f"{name}{world.rank}")
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    rw.barrier()
    return len(file.read_text())


@pytest.mark.flaky(reruns=2)
def test_passes_at_last(world: Session) -> None:
    attempts = attempt(world, "at_last")
    if attempts == 1 and world.rank == 1:
        os._exit(3)
    if attempts == 2 and world.rank == 1:
        raise ValueError("not yet")
    assert rw.all_reduce(1) == 2


@pytest.mark.flaky(reruns=1)
def test_fails_always(world: Session) -> None:
    raise ValueError(f"attempt {attempt(world, 'always')}")


@pytest.mark.flaky(reruns=1)
@pytest.mark.ranks(0)
def test_no_such_world() -> None: ...


@pytest.mark.flaky(reruns=1)
@pytest.mark.ranks("serial")
def test_in_this_process() -> None:
    with Path("serial").open("a") as file:
        file.write("x")
    assert Path("serial").read_text() == "xx"


@pytest.mark.flaky(reruns=5, only_rerun=[OwnError])
def test_only_of_one_error(world: Session) -> None:
    raise OwnError("not yet") if attempt(world, "only") == 1 else ValueError("another one")


@pytest.mark.flaky(reruns=2)
def test_subtests(world: Session, subtests: pytest.Subtests) -> None:
    attempts = attempt(world, "subtests")
    with subtests.test("one"):
        assert attempts == 2


def test_is_not_flaky(world: Session) -> None:
    assert attempt(world, "not") == 1
