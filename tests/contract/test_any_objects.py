"""Objects of many types and of any size come back as they are: each alone, and random ones in containers."""

from __future__ import annotations

import collections
import enum
import io
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankwise as rw
from rankwise._comm.group import Group
from tests.contract import random_objects as model
from tests.contract.random_values import EXAMPLES
from tests.tables import each_row

pytestmark = pytest.mark.ranks("serial", 2, 3)


@each_row("length", model.LENGTHS, collective=True)
def test_objects_of_every_kind(comm: Group, length: int) -> None:
    rank = rw.get_rank()
    for kind, make in model.KINDS.items():
        for other, found in enumerate(rw.all_gather(make(length, rank))):
            assert model.same(found, make(length, other)), kind


@pytest.mark.soak(50)
@pytest.mark.ranks("serial", 2, 3, 4)
def test_random_objects(comm: Group, seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(EXAMPLES, max_examples=15)
    @given(st.lists(model.templates, min_size=comm.size, max_size=comm.size), st.integers(0, comm.size - 1))
    def check(each: list[Any], one: int) -> None:
        rank = rw.get_rank()
        wanted = [model.made(template, other) for other, template in enumerate(each)]
        assert model.same(rw.all_gather(wanted[rank]), wanted)
        gathered = rw.gather(wanted[rank], dst=one)
        assert model.same(gathered, wanted) if rank == one else gathered is None
        assert model.same(rw.broadcast(wanted[rank] if rank == one else None, src=one), wanted[one])
        assert model.same(rw.scatter(wanted if rank == one else None, src=one), wanted[rank])

    check()


class Label(str):
    __slots__ = ()


class Level(enum.IntEnum):
    LOW = 1


def test_short_values_of_plain_types_and_those_that_are_nearly_so(comm: Group) -> None:
    """Of the first ones a pickle alone is sent; subclasses, long and nested ones take the way of all others."""
    plain: list[Any] = [None, True, -(10**400), 0.1, "ä\udc80", b"", {}, (), [1, None], {1: "a", None: b"b", "c": 2.5}]
    nearly = ["x" * 10_000, list(range(64)), list(range(65)), dict.fromkeys(range(65)), {"a": {"b": 1}}, ([],), 1j]
    nearly += [collections.OrderedDict(b=1, a=2), {"a": float}, Label("a"), [Level.LOW], {Level.LOW: 1}]
    for value in [*plain, *nearly]:
        sent = [value, rw.get_rank()]
        for found in (rw.all_gather(value)[-1], rw.broadcast(value), rw.all_gather(sent)[-1][0]):
            assert found == value
            assert type(found) is type(value)
            assert repr(found) == repr(value)


def test_open_files_are_refused_and_standard_streams_are_not(
    comm: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contents of a file would be sent, and the others would write to copies of it in memory."""
    file = tmp_path / "train.log"
    file.write_text("line\n")
    with file.open("a") as log, pytest.raises(rw.PayloadTypeError, match=r"open file .*train\.log'"):
        rw.all_gather({"log": log})
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))  # pytest's own cannot be pickled
    assert rw.broadcast(sys.stderr) is sys.stderr
