"""Tests in ranks, each with a feature of another plugin."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks("serial", 2)


@pytest.mark.asyncio
async def test_asyncio(world: Session) -> None:
    await asyncio.sleep(0)
    assert rw.all_reduce(1) == world.world_size


def test_mock(world: Session, mocker: Any) -> None:
    mocker.patch("os.getcwd", return_value=f"/{world.rank}")
    assert rw.all_gather(os.getcwd()) == [f"/{rank}" for rank in range(world.world_size)]  # noqa: PTH109 - the mock


def test_randomly(world: Session) -> None:
    assert len(set(rw.all_gather(random.random()))) == 1  # noqa: S311


def test_subtests(world: Session, subtests: pytest.Subtests) -> None:
    for number in range(2):
        with subtests.test(number=number):
            assert rw.all_reduce(number) == number * world.world_size


@given(number=st.integers(0, 100))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hypothesis(world: Session, number: int) -> None:
    assert rw.all_reduce(number) == number * world.world_size


@pytest.mark.ranks(1)
def test_hypothesis_is_imported_before_ranks_are_forked() -> None:
    assert all(found is not hypothesis for found in gc.get_objects())  # `gc` no longer has objects from before


def test_syrupy(world: Session, snapshot: object) -> None:
    assert {"size": world.world_size} == snapshot


@pytest.mark.timeout(50)
@pytest.mark.flaky(reruns=2)
def test_timeout_and_reruns(world: Session) -> None:
    attempt = Path(f"attempt{world.world_size}.{world.rank}")
    first = not attempt.exists()
    attempt.touch()
    assert not any(rw.all_gather(first))
