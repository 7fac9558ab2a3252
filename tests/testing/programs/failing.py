"""Tests that fail, each in its own way."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(4)


def test_on_one_rank(world: Session) -> None:
    print("words of rank", world.rank)
    logging.getLogger("mine").warning("logged by all")
    assert [world.rank, 1] != [2, 1], "this is not for rank two"


def test_on_all_ranks_alike(world: Session) -> None:
    print("words of all")
    raise ValueError("no data")


def test_on_all_ranks_differently(world: Session) -> None:
    assert world.rank == 17


def test_while_others_wait(world: Session) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    rw.all_reduce(torch.ones(1))


def test_while_others_wait_in_torch(world: Session) -> None:
    if world.rank == 1:
        raise ValueError("no data")
    dist.all_reduce(torch.ones(1))


@pytest.fixture
def begins_badly(world: Session) -> Iterator[None]:
    if world.rank == 0:
        raise RuntimeError("bad beginning")
    yield
    print("put away")


def test_fixture(begins_badly: None) -> None:
    raise AssertionError("no rank runs the body")


@pytest.fixture
def ends_badly(world: Session) -> Iterator[None]:
    yield
    if world.rank == 3:
        raise RuntimeError("bad end")


def test_end_of_a_fixture(ends_badly: None) -> None:
    pass


def test_killed(world: Session) -> None:
    print("last words of rank", world.rank)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rw.barrier()


def test_crashed(world: Session) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    rw.barrier()


def test_ended(world: Session) -> None:
    if world.rank == 1:
        os._exit(3)
    rw.barrier()


def test_left(world: Session) -> None:
    if world.rank == 1:
        sys.exit(3)
    rw.barrier()


@pytest.mark.xfail(strict=True, reason="nobody knows")
def test_unexpectedly_passed(world: Session) -> None:
    pass


def test_server_killed(world: Session) -> None:
    if world.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


@pytest.fixture(scope="module")
def ends_badly_after_the_last_test() -> Iterator[None]:
    yield
    raise RuntimeError("bad end of the module")


@pytest.mark.ranks("serial")
def test_serial_before_the_last_test(ends_badly_after_the_last_test: None) -> None:
    pass


def test_the_next_one_is_not_poisoned(world: Session) -> None:
    assert rw.all_reduce(1) == 4
