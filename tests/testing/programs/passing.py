"""Tests that pass in their worlds, with everything that pytest offers."""

from __future__ import annotations

import logging
import os
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)

# The memory of this process: a test finds values of an earlier one if both run in the same process.
SEEN: dict[str, int] = {}


@pytest.fixture(scope="module")
def made_once() -> Iterator[list[str]]:
    SEEN["module fixtures"] = SEEN.get("module fixtures", 0) + 1
    yield ["made"]
    SEEN["module fixtures"] -= 1


@pytest.fixture
def doubled(number: int) -> int:
    return 2 * number


def test_a_module_has_a_marker(world: Session) -> None:
    assert SEEN.setdefault("process", os.getpid()) == os.getpid()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size() == world.world_size == 2


def test_ranks_are_kept() -> None:
    assert SEEN.setdefault("process", os.getpid()) == os.getpid()
    assert not dist.is_initialized()


@pytest.mark.ranks("serial", 1, 3)
@pytest.mark.parametrize("number", [1, 2])
def test_sizes_and_parameters(world: Session, number: int, doubled: int, request: pytest.FixtureRequest) -> None:
    assert doubled == 2 * number
    name = {1: "serial" if world.group is None else "1rank", 3: "3ranks"}[world.world_size]
    assert request.node.name == f"test_sizes_and_parameters[{name}-{number}]"
    assert rw.all_gather(world.rank) == list(range(world.world_size))


@pytest.mark.ranks(3)
class TestClass:
    def test_a_class_has_a_marker(self, world: Session) -> None:
        assert world.topology.world_size == int(os.environ["WORLD_SIZE"]) == 3

    @pytest.mark.ranks(1)
    def test_the_closest_marker_counts(self, world: Session) -> None:
        assert world.world_size == 1


class TestCase(unittest.TestCase):
    def setUp(self) -> None:
        self.rank = int(os.environ["RANK"])

    def test_methods_run_in_ranks(self) -> None:
        assert rw.get_world_size() == 2
        assert rw.get_rank() == self.rank


@pytest.mark.parametrize("time", ["first", "second"])
def test_fixtures_of_a_module_are_kept(made_once: list[str], time: str) -> None:
    assert made_once == ["made"]
    assert SEEN["module fixtures"] == 1


def test_tmp_path_is_the_same_on_all_ranks(world: Session, tmp_path: Path) -> None:
    assert rw.all_gather(str(tmp_path)) == [str(tmp_path)] * 2
    (tmp_path / str(world.rank)).touch()
    rw.barrier()
    assert len(list(tmp_path.iterdir())) == 2


def test_folders_of_the_factory_are_of_each_rank(world: Session, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert len(set(rw.all_gather(str(tmp_path_factory.mktemp("mine"))))) == 2


def test_monkeypatch_is_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONLY_HERE", os.environ["RANK"])
    monkeypatch.setattr(torch, "ones", None)
    monkeypatch.chdir(tmp_path)


def test_nothing_of_that_is_left() -> None:
    assert "ONLY_HERE" not in os.environ
    assert torch.ones(1) == 1
    assert SEEN.setdefault("process", os.getpid()) == os.getpid()


def test_capsys(world: Session, capsys: pytest.CaptureFixture[str]) -> None:
    print("rank", world.rank)
    assert capsys.readouterr().out == f"rank {world.rank}\n"


def test_capfd(world: Session, capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, f"rank {world.rank}".encode())
    assert capfd.readouterr().out == f"rank {world.rank}"


def test_caplog(world: Session, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("mine").warning("rank %d", world.rank)
    assert caplog.messages == [f"rank {world.rank}"]


def test_raises(world: Session) -> None:
    with pytest.raises(rw.MismatchError, match="rank 1"):
        rw.all_reduce(torch.ones(1 + world.rank))


def test_the_program_joins_by_itself() -> None:
    with rw.init(timeout=20) as session:
        assert rw.all_gather(session.rank) == [0, 1]


def test_torch_joins_by_itself() -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert tensor == 2


@pytest.mark.ranks(2, backend="gloo", timeout=30, device="cpu")
def test_options(world: Session) -> None:
    assert dist.get_backend() == "gloo"
    assert world.device == torch.device("cpu")


@pytest.mark.parametrize("time", ["first", "second"])
def test_random_numbers_begin_anew(time: str) -> None:
    number = int(torch.randint(1 << 40, (1,)))
    assert SEEN.setdefault("random", number) == number


@pytest.mark.parametrize("time", range(4))
def test_groups_are_let_go_of(world: Session, time: int) -> None:
    """The kernel counts gloo's threads too, Python's `threading` only a test's own."""
    assert threading.enumerate() == [threading.main_thread()]
    first = SEEN.setdefault("threads", len(list(Path("/proc/self/task").iterdir())))
    while len(list(Path("/proc/self/task").iterdir())) > first:
        pass  # until the test's limit


@pytest.mark.ranks("serial")
def test_serial_is_alone(world: Session) -> None:
    assert (world.rank, world.world_size) == (0, 1)
    assert rw.all_reduce(3) == 3
