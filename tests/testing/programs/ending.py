"""Tests that have failed, or passed, and end badly or late."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def slow_to_end() -> Iterator[None]:
    yield
    time.sleep(2.5)


@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(slow_to_end: None) -> None:
    raise ValueError


def test_one_exits_when_the_other_has_failed(world: Session) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    with pytest.raises(rw.CollectiveError):
        rw.barrier()
    os._exit(7)


@record
def fails() -> None:
    raise ValueError("no data")


def test_an_error_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data"):
        fails()
    assert tmp_path.parents[1] in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents
    assert "no data" in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text()


@pytest.fixture(scope="module")
def ends_the_process() -> Iterator[None]:
    yield
    os._exit(3)


def test_a_child_comes_to_the_end() -> None:
    child = os.fork()
    if child == 0:
        raise ValueError
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_leaves_something(ends_the_process: None) -> None:
    os.environ["LEFT"] = "1"  # so the ranks are replaced, and put the fixture away before


def test_passes() -> None: ...
