"""Tests beside the hooks of other plugins."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def slow_on_one_rank(world: Session) -> None:
    time.sleep(0.5 * world.rank)


@pytest.mark.refused
def test_refused(slow_on_one_rank: None) -> None: ...


def test_the_next_one_is_not_poisoned(world: Session) -> None:
    assert rw.all_reduce(1) == 2


@pytest.mark.run_without_reports
def test_reported_late(world: Session) -> None: ...


@pytest.mark.not_run
def test_reported_never(world: Session) -> None: ...


def test_ranks_have_the_values_of_workers(worker_values: tuple[str, int]) -> None:
    assert worker_values == (f"for {os.environ.get('PYTEST_XDIST_WORKER', 'master')}", 17)


def test_ranks_have_the_plugins_of_the_run(request: pytest.FixtureRequest) -> None:
    if request.config.pluginmanager.has_plugin("xdist"):
        assert request.getfixturevalue("worker_id")
    else:
        with pytest.raises(pytest.FixtureLookupError):
            request.getfixturevalue("worker_id")
    assert request.config.getoption("inline_snapshot") == "disable"


@pytest.fixture(scope="module")
def open_for_long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    tmp_path_factory.mktemp("data", numbered=False)
    dist.init_process_group("gloo")
    yield int(os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("number", [1, 2])
def test_fixtures_are_of_one_world(open_for_long: int, number: int) -> None:
    assert dist.get_world_size() == open_for_long == int(os.environ["WORLD_SIZE"])
    dist.barrier()


def test_the_body_runs(world: Session) -> None:
    Path("ran").touch()
