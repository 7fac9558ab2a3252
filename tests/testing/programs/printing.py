"""Tests that print at the same time, whole lines and parts of lines, to an output that is a file."""

from __future__ import annotations

import os
import sys
import time

import pytest

import rankwise as rw
from rankwise._session.session import Session


@pytest.mark.ranks(3)
def test_lines(world: Session) -> None:
    print()
    for number in range(100):
        print("line", number, "of", world.rank, "x" * (20_000 if number % 50 == 0 else 1))
        print("error", number, "of", world.rank, file=sys.stderr)
    print(f"two lines of {world.rank}", f"the second of {world.rank}", sep="\n")


@pytest.mark.ranks(2)
def test_parts_of_lines(world: Session) -> None:
    if world.rank == 0:
        print("\nis it there? ", end="", flush=True)
    rw.barrier()
    if world.rank == 1:
        print("another line")
    rw.barrier()
    if world.rank == 0:
        print("yes")
        for percent in (0, 100):
            sys.stderr.write(f"\rdone {percent}%")
            sys.stderr.flush()
        sys.stderr.write("\n")


@pytest.mark.ranks(2)
def test_a_part_that_nobody_flushes(world: Session) -> None:
    if world.rank == 0:
        before = os.fstat(1).st_size
        deadline = time.monotonic() + 100
        print("unfinished", end="")
        while os.fstat(1).st_size == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        print()


@pytest.mark.ranks(2)
def test_output_that_the_test_captures(world: Session, capfd: pytest.CaptureFixture[str]) -> None:
    for stream in (sys.__stdout__, sys.stdout):
        print("seen by the test", file=stream, flush=True)
    assert capfd.readouterr().out == "seen by the test\n" * 2


@pytest.mark.ranks(1)
def test_alone() -> None:
    print("\nnobody else is here")
