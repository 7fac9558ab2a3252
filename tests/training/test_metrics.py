"""Metrics: the means are those of all samples, whichever ranks have them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row


@pytest.mark.ranks("serial", 1, 2, 3)
def test_means_are_weighted_and_names_may_differ(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    log = rw.Metrics()
    assert log.compute() == {}
    samples = [[float(rank * 10 + index)] * (index + 1) for index in range(rank)]  # none on rank zero
    for batch in samples:
        log.add(loss=(torch.tensor(batch).sum(), len(batch)), **{f"only{rank}": np.float32(0.5)})
    every = [rank * 10.0 + index for rank in range(size) for index in range(rank) for _ in range(index + 1)]
    expected = {} if size == 1 else {"loss": sum(every) / len(every)}
    expected |= {f"only{other}": 0.5 for other in range(1, size)}
    found = log.compute()
    assert found == pytest.approx(expected)
    assert list(found) == sorted(expected)
    assert len(set(rw.all_gather(repr(found)))) == 1
    assert log.compute() == {}


@pytest.mark.ranks("serial", 2)
def test_what_is_not_a_number_does_not_stop_the_others(comm: Group) -> None:
    log = rw.Metrics()
    log.add(loss=(math.nan if rw.is_rank_zero() else 1.0, 1), big=(math.inf, 1), empty=(0, 0), good=(3, 2))
    log.add(big=(-math.inf, 1))
    found = log.compute()
    assert [math.isnan(found[name]) for name in ("big", "empty", "good", "loss")] == [True, True, False, True]
    assert found["good"] == 1.5


def test_sums_are_of_64_bits() -> None:
    log = rw.Metrics()
    for _ in range(3000):
        log.add(loss=(torch.ones(1, dtype=torch.bfloat16, requires_grad=True), torch.tensor(1)))
    assert log._sums["loss"].dtype == torch.float64
    assert not log._sums["loss"].requires_grad
    log.add(loss=(0, 3000))
    assert log.compute() == {"loss": 0.5}


class BrokenTensor(torch.Tensor):
    """A tensor that cannot be read, as after an error of its device."""

    def __float__(self) -> float:
        raise RuntimeError("device-side assert")


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_one_on_all(comm: Group) -> None:
    log = rw.Metrics()
    log.add(loss=1)
    if rw.get_rank() == 1:
        log._sums["loss"] = torch.zeros(()).as_subclass(BrokenTensor)
    with pytest.raises(RuntimeError if rw.get_rank() else rw.RemoteRankError, match="device-side assert"):
        log.compute()
    assert rw.all_reduce(1) == 2


@each_row(
    "value",
    ["1", None, True, (1, 2, 3), (1,), (1, -1), (1, math.nan), torch.ones(2), torch.tensor(1j), [1, 2]],
    ids=str,
)
def test_odd_values_are_refused_and_nothing_is_added(value: Any) -> None:
    log = rw.Metrics()
    with pytest.raises(rw.InvalidArgumentError, match="loss"):
        log.add(good=1, loss=value)
    assert log.compute() == {}
