"""One body for every world: calls with different arguments of the same meaning match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = [pytest.mark.ranks("serial", 2, 4), pytest.mark.usefixtures("torch_random")]


def cat(dim: Any) -> Callable[[Group], object]:
    return lambda _: rw.all_gather_cat(torch.ones(2, 2), dim=dim)


# Arguments are of types that the signatures do not name.
one: Any = np.int64(1)
none: Any = np.int64(0)
yes: Any = np.True_
no: Any = np.False_
zero: Any = torch.tensor(0)
minute: Any = np.int64(60)


# Pairs of equivalent calls.
SAME: dict[str, list[Callable[[Group], object]]] = {
    "op": [lambda _: rw.all_reduce(1, op="max"), lambda _: rw.all_reduce(1, op=np.str_("max"))],
    "op in place": [
        lambda _: rw.all_reduce_(torch.ones(3), "min"),
        lambda _: rw.all_reduce_(torch.ones(3), np.str_("min")),
    ],
    "differentiable": [
        lambda _: rw.all_reduce(torch.ones(2), differentiable=False),
        lambda _: rw.all_reduce(torch.ones(2), differentiable=no),
    ],
    "differentiable gather": [
        lambda _: rw.all_gather(torch.ones(2), differentiable=True),
        lambda _: rw.all_gather(torch.ones(2), differentiable=yes),
    ],
    "src": [
        lambda _: rw.broadcast(1, src=0),
        lambda _: rw.broadcast(1, src=none),
        lambda _: rw.broadcast(1, src=zero),
    ],
    "dst": [lambda _: rw.gather(1, dst=0), lambda _: rw.gather(1, dst=none)],
    "dst of reduce": [
        lambda _: rw.reduce(1),
        lambda _: rw.reduce(1, dst=none),
        lambda _: rw.reduce(1, "sum", dst=zero),
    ],
    "op of reduce": [lambda _: rw.reduce(1, op="max"), lambda _: rw.reduce(1, op=np.str_("max"))],
    "values of all_to_all": [
        lambda comm: rw.all_to_all([1] * comm.size),
        lambda comm: rw.all_to_all(torch.ones(comm.size)),
        lambda comm: rw.all_to_all(np.ones(comm.size)),  # type: ignore[call-overload]  # arrays have rows
    ],
    "src of scatter": [
        lambda comm: rw.scatter([1] * comm.size),
        lambda comm: rw.scatter([1] * comm.size, src=none),
    ],
    "src of sync_params": [
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(2)),
        lambda _: rw.sync_params(torch.nn.BatchNorm1d(2), src=none),
    ],
    "dim": [cat(dim=1), cat(dim=-1), cat(dim=one)],
    "dim of none": [lambda _: rw.all_gather_cat(torch.tensor(1)), lambda _: rw.all_gather_cat(torch.tensor(1), -1)],
    "ranks": [lambda _: rw.new_group([0]), lambda _: rw.new_group([none])],
    "timeout": [lambda _: rw.barrier(timeout=60), lambda _: rw.barrier(timeout=minute)],
    "name": [lambda _: rw.barrier("a"), lambda _: rw.barrier(np.str_("a"))],
    "numbers": [lambda _: rw.all_reduce(True), lambda _: rw.all_reduce(np.True_)],
}


@each_row("name", SAME, collective=True)
def test_equivalent_calls_match(comm: Group, name: str) -> None:
    calls = SAME[name]
    for first in range(len(calls)):
        calls[(first + rw.get_rank()) % len(calls)](comm)
    assert rw.all_reduce(1) == comm.size
