"""Tests of unusual kinds."""

from __future__ import annotations

import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)

SEEN: dict[str, int] = {}


def test_a_subtest_fails(world: Session, subtests: pytest.Subtests) -> None:
    with subtests.test("good"):
        assert rw.all_reduce(1) == 2
    for name in ("bad", "worse"):
        with subtests.test(name):
            assert world.rank == 0, "this is not for rank one"
    assert rw.all_reduce(1) == 2


def test_subtests_pass(world: Session, subtests: pytest.Subtests) -> None:
    for number in range(3):
        with subtests.test(number=number):
            assert rw.all_reduce(number) == 2 * number
    assert rw.all_reduce(1) == 2


class TestCase(unittest.TestCase):
    def test_a_subtest_fails(self) -> None:
        with self.subTest("bad"):
            assert os.environ["RANK"] == "0", "nor is this"


def test_a_folder_is_asked_for_late(request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    assert folder.is_absolute()
    assert folder.is_dir()


@pytest.fixture(scope="class")
def open_for_long() -> Iterator[None]:
    os.environ["OPEN"] = "1"
    dist.init_process_group("gloo")
    SEEN["opened"] = SEEN.get("opened", 0) + 1
    yield
    dist.destroy_process_group()
    del os.environ["OPEN"]


@pytest.mark.usefixtures("open_for_long")
class TestClass:
    @pytest.mark.parametrize("time", [1, 2, 3])
    def test_fixtures_of_a_class_may_stay(self, time: int) -> None:
        assert os.environ["OPEN"] == "1"
        assert time <= 3
        assert SEEN["opened"] == 1
        dist.barrier()


def test_an_optimizer_is_made() -> None:
    SEEN["optimizer"] = os.getpid()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


def test_an_optimizer_was_made() -> None:
    assert SEEN["optimizer"] == os.getpid()


def test_properties(record_property: Callable[[str, object], None]) -> None:
    record_property("losses", [1, 2])
    record_property("function", lambda: None)


def test_a_warning(world: Session) -> None:
    warnings.warn("mind the gap", DeprecationWarning, stacklevel=1)


@given(number=st.integers())
@settings(max_examples=5, deadline=None)
def test_all_draw_the_same(number: int) -> None:
    SEEN["sum"] = SEEN.get("sum", 0) + number


def test_all_have_drawn_the_same(world: Session) -> None:
    assert len(set(rw.all_gather(SEEN["sum"]))) == 1


def test_streams_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)


def test_one_skips_while_the_other_waits(world: Session) -> None:
    if world.rank == 1:
        pytest.skip("not here")
    rw.barrier()


def test_an_error_cannot_be_printed(world: Session) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise OddError


@pytest.fixture(scope="session")
def ends_badly() -> Iterator[None]:
    yield
    raise RuntimeError("a bad end of the session")


def test_begins_what_ends_badly(ends_badly: None) -> None:
    os.environ["LEFT"] = "1"  # so the ranks are replaced


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ranks(1)), pytest.param(2)])
def test_a_parameter_has_a_marker(world: Session, size: int) -> None:
    assert world.world_size == size


@pytest.mark.ranks("serial")
def test_serial_is_alone(world: Session) -> None:
    assert world.world_size == 1
    assert not {"RANK", "RANKWISE_RANK", "SLURM_PROCID"} & os.environ.keys()
    assert (os.environ["MASTER_KEY"], os.environ["RANKER_URL"], os.environ["SLURM_CONF"]) == ("a", "b", "c")
