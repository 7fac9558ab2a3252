"""Tests that do not come to an end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(3, timeout=5)


def test_one_sleeps(world: Session) -> None:
    print("words of rank", world.rank)
    if world.rank == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(3, timeout=20)
def test_one_fails_and_the_others_sleep(world: Session) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    time.sleep(100)


@pytest.fixture
def never(world: Session) -> None:
    if world.rank == 2:
        time.sleep(100)


def test_a_fixture_sleeps(never: None) -> None:
    pass


def test_nobody_joins(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=3)


def test_the_next_one_is_not_poisoned(world: Session) -> None:
    dist.barrier()
