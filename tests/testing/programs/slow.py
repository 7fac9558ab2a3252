"""Tests that pytest-timeout measures, and one that is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The first time, ranks take longer to come than the test that waits for them may take.
if "RANK" in os.environ and not (came := Path(f"came{os.environ['RANK']}")).exists():
    came.touch()
    time.sleep(5)


@pytest.mark.timeout(4)
@pytest.mark.ranks(2)
def test_is_quick() -> None:
    pass


@pytest.fixture(scope="module")
def ends_late() -> Iterator[None]:
    yield
    time.sleep(100)


@pytest.mark.timeout(3)
@pytest.mark.ranks(2)
def test_ends_ranks_that_end_late(ends_late: None) -> None:
    os.environ["LEFT"] = "behind"


@pytest.mark.timeout(3)
@pytest.mark.ranks(2)
def test_sleeps() -> None:
    time.sleep(100)


@pytest.mark.timeout(3, method="thread")
@pytest.mark.ranks(2)
def test_sleeps_beside_a_timer() -> None:
    time.sleep(100)


@pytest.mark.ranks(2)
def test_is_interrupted() -> None:
    Path(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(100)
