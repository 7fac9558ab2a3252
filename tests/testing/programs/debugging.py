"""Tests that call a debugger, and read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2, timeout=3)


def test_a_rank_is_debugged(world: Session) -> None:
    Path(f"process{world.rank}").write_text(str(os.getpid()))
    if world.rank == 1:
        breakpoint()  # noqa: T100 - which is the point
    assert rw.all_reduce(1) == 2


def test_a_rank_reads(world: Session) -> None:
    if world.rank == 1:
        assert input("a question? ") == "an answer"
        assert Path("process1").read_text() == str(os.getpid())
