"""Every public call that is no collective of data, with each kind of wrong argument: the same in all worlds.

Each row of the table is one argument. What is not among the kinds that it takes is an error of ours, on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.testing import environments, fakes
from tests.tables import each_row

TOPOLOGY = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}


class Odd:
    """An object of some class, which cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]  # as of a tensor's or an array's cousins


KINDS: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "text",
    "empty": lambda: "",
    "digit": lambda: "1",
    "bytes": lambda: b"1",
    "true": lambda: True,
    "np true": lambda: np.True_,
    "tensor true": lambda: torch.tensor(True),
    "zero": lambda: 0,
    "one": lambda: 1,
    "np one": lambda: np.int64(1),
    "np byte": lambda: np.uint8(1),
    "0-d one": lambda: torch.tensor(1),
    "np 0-d": lambda: np.array(1),
    "half": lambda: 0.5,
    "np half": lambda: np.float32(0.5),
    "minus": lambda: -1,
    "huge": lambda: 10**400,
    "too long to show": lambda: 10**5000,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "complex": lambda: 1j,
    "list": lambda: [1],
    "vector": lambda: torch.ones(2),
    "array": lambda: np.ones(2),
    "generator": lambda: (one for one in "ab"),
    "endless": itertools.count,
    "dict": lambda: {"a": 1},
    "class": lambda: int,
    "odd": Odd,
}
ONES = {"one", "np one", "np byte", "0-d one", "np 0-d"}
FLAGS = {"true", "np true", "tensor true"}
SECONDS = ONES | {"half", "np half"}
TEXTS = {"text", "empty", "digit"}


@dataclass(frozen=True)
class Row:
    """One argument of one call.

    Attributes:
        name: Of the call and the argument.
        call: The call, given the argument.
        takes: The kinds that are no error.
        may_take: The kinds that are right in some worlds.
    """

    name: str
    call: Callable[[Any], object]
    takes: set[str]
    may_take: set[str] = field(default_factory=set)


def entered(context: Any) -> object:
    """Enter a context, and leave it."""
    with context as value:
        return value


def init(**options: Any) -> object:
    """Join in a session, and leave that."""
    with rw.init(**options) as session:
        return session.rank


def by_name(call: Callable[..., object], name: str, **others: object) -> Callable[[Any], object]:
    """Return a call that takes one argument by name."""
    return lambda value: call(**others | {name: value})


def rows() -> Iterator[Row]:
    for name in TOPOLOGY:
        takes = ONES if name in {"world_size", "local_world_size", "num_nodes"} else {"zero"}
        yield Row(f"Topology {name}", by_name(rw.Topology, name, **TOPOLOGY), takes)
        if name in {"rank", "world_size", "local_rank", "local_world_size"}:
            yield Row(f"init {name}", by_name(init, name), {"none"}, {*ONES, "zero"})
    yield Row("init backend", by_name(init, "backend"), {"none"})
    yield Row("init device", by_name(init, "device"), {"none"})
    yield Row("init timeout", by_name(init, "timeout"), SECONDS | {"none"})
    yield Row("init launcher", by_name(init, "launcher"), set())
    yield Row("init address", by_name(init, "address"), {"none"})
    yield Row("init check", by_name(init, "check"), FLAGS | {"none"})
    yield Row("init environ", by_name(init, "environ"), {"none"})
    yield Row("detect", rw.detect, set())
    yield Row("detect launcher", lambda value: rw.detect({}, value), set())
    yield Row("new_group", rw.new_group, set(), {"list"})
    yield Row("new_group of one", lambda value: rw.new_group([value]).size, {"zero"}, ONES)
    yield Row("barrier name", rw.barrier, TEXTS)
    yield Row("barrier timeout", by_name(rw.barrier, "timeout"), SECONDS | {"inf", "none"})
    yield Row("barrier group", by_name(rw.barrier, "group"), {"none"})
    yield Row("rank_zero_only", rw.rank_zero_only, {"class"})
    yield Row("one_rank_only", rw.one_rank_only, {*ONES, "zero", "huge", "too long to show"})
    yield Row("one_rank_only share", lambda value: rw.one_rank_only(share=value)(int)(), FLAGS)
    yield Row("one_rank_only of", rw.one_rank_only(), {"class"})
    yield Row("rank_zero_first local", lambda value: entered(rw.rank_zero_first(local=value)), FLAGS)
    yield Row("launch", lambda value: rw.launch(value, nproc=0), set())
    yield Row("launch nproc", lambda value: rw.launch(1, nproc=value), set())  # type: ignore[arg-type]
    yield Row("recording rank", lambda value: entered(fakes.recording(rank=value)), {*ONES, "zero"})
    yield Row("recording world_size", lambda value: entered(fakes.recording(world_size=value)), ONES)
    yield Row(
        "recording replies",
        lambda value: entered(fakes.recording(replies=value)),
        {"list", "vector", "array", "generator", "endless", "dict"},
    )
    yield Row("fake_torchrun port", by_name(environments.fake_torchrun, "port"), ONES)
    yield Row("fake_torchrun address", by_name(environments.fake_torchrun, "address"), TEXTS)
    yield Row("fake_slurm cpus", by_name(environments.fake_slurm, "cpus_per_task"), {*ONES, "none"})
    yield Row("fake_slurm job", by_name(environments.fake_slurm, "job_id"), {*ONES, "zero"})
    for fake in (
        environments.fake_torchrun,
        environments.fake_slurm,
        environments.fake_openmpi,
        environments.fake_pmi,
    ):
        name = fake.__name__
        yield Row(f"{name} tasks", fake, {*ONES, "list"})
        yield Row(f"{name} nodes", by_name(fake, "nodes"), {*ONES, "none"})
        if "torchrun" not in name:
            yield Row(f"{name} name", by_name(fake, "name"), TEXTS)


def outcome(row: Row, kind: str) -> str:
    """Return "" if a call went as the table has it, else what it did."""
    try:
        row.call(KINDS[kind]())
    except rw.RankwiseError as error:
        if kind in row.takes:
            return f"{row.name}, {kind}: {error!r:.300}"
        if kind not in row.may_take and not isinstance(error, (rw.InvalidArgumentError, rw.TopologyError)):
            return f"{row.name}, {kind}: {error!r:.300}"
        return "" if len(str(error)) < 2000 else f"{row.name}, {kind}: a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001 - what the table is for
        return f"{row.name}, {kind}: raw {error!r:.300}"
    return "" if kind in row.takes | row.may_take else f"{row.name}, {kind}: accepted"


@pytest.mark.ranks("serial", 2)
@each_row("row", rows(), ids=lambda row: row.name, collective=True)
def test_a_wrong_argument_is_an_error_of_ours_in_every_world(comm: Group, row: Row) -> None:
    found = [text for kind in KINDS if (text := outcome(row, kind))]
    assert not found, "\n".join(found)
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


@pytest.mark.ranks(2, 3)
def test_a_wrong_argument_of_one_rank_is_heard_of_by_all(comm: Group) -> None:
    wrong = rw.get_rank() == comm.size - 1
    for call in (
        lambda: rw.barrier(timeout="5" if wrong else 5),  # type: ignore[arg-type]  # that is the point
        lambda: rw.barrier(5 if wrong else ""),  # type: ignore[arg-type]  # that is the point
        lambda: rw.new_group([True if wrong else 0]),
        lambda: rw.new_group(None if wrong else [0]),  # type: ignore[arg-type]  # that is the point
    ):
        with pytest.raises(
            rw.InvalidArgumentError if wrong else rw.RemoteRankError, match=r"timeout=|name=|a rank|got"
        ):
            call()
        assert rw.all_reduce(1) == comm.size, "and the next collective works"
