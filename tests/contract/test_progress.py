"""`progress=`: what a rank is told while large values are written, sent and received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._collectives import progress
from rankwise._comm.control import shared_file
from rankwise._comm.group import Comm

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.slow_with_ranks(3)]

LENGTH = 400_000
NBYTES = 4 * LENGTH
CALLS: dict[str, Callable[..., Any]] = {
    "all_gather": rw.all_gather,
    "gather": lambda value, **settings: rw.gather(value, dst=1, **settings),
    "broadcast": lambda value, **settings: rw.broadcast(value, src=1, **settings),
    "scatter": lambda value, **settings: rw.scatter([value] * rw.get_world_size(), src=1, **settings),
    "all_gather, async_op": lambda value, **settings: rw.all_gather(value, async_op=True, **settings).wait(),
    "all_gather, safe": lambda value, **settings: rw.all_gather(value, safe=True, **settings),
}


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_STEP_BYTES", NBYTES // 4)
    monkeypatch.setattr(shared_file, "_MAX_BYTES", NBYTES // 4)


def large() -> torch.Tensor:
    return torch.full((LENGTH,), float(rw.get_rank()))


def least_expected(name: str, size: int) -> int:
    """Return how many bytes this rank writes, sends and receives at least."""
    if name in {"broadcast", "scatter"}:
        return NBYTES
    return NBYTES if name == "gather" and rw.get_rank() != 1 else (size - 1) * NBYTES


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_it_grows_to_what_is_expected(comm: Comm, name: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only some of the ranks ask for it."""
    if not shares:
        monkeypatch.setattr(shared_file, "_CREATE", None)
    for asking in ([0, 1, 2], [1]):
        told: list[tuple[int, int]] = []
        settings = {"progress": lambda *numbers: told.append(numbers)} if rw.get_rank() in asking else {}  # noqa: B023
        CALLS[name](large(), **settings)
        if not settings:
            continue
        done, totals = zip(*told, strict=True)
        assert list(done) == sorted({*done})
        assert list(totals) == sorted(totals)
        assert done[-1] == totals[-1] >= least_expected(name, comm.size)
        assert rw.get_rank() != 1 or len(told) > 3


def test_small_values_have_none(comm: Comm) -> None:
    told: list[tuple[int, int]] = []
    assert rw.all_gather(1, progress=lambda *numbers: told.append(numbers)) == [1] * comm.size
    assert told == []


@pytest.mark.parametrize("name", CALLS)
def test_its_error_is_raised_after_the_call_on_its_rank_alone(comm: Comm, name: str) -> None:
    told: list[int] = []

    def fail(done: int, _: int) -> None:
        told.append(done)
        raise ValueError("no progress here")

    if rw.get_rank() == 1:
        with pytest.raises(ValueError, match="no progress here"):
            CALLS[name](large(), progress=fail)
        assert len(told) == 1
    else:
        CALLS[name](large())
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))


def test_a_collective_inside_of_it_is_refused(comm: Comm) -> None:
    with pytest.raises(rw.CollectiveError, match="cannot begin inside of"):
        rw.all_gather(large(), progress=lambda *_: rw.barrier())
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))


@pytest.mark.parametrize("name", CALLS)
def test_other_arguments_are_refused_on_all_ranks(comm: Comm, name: str) -> None:
    wrong: Any = 7 if rw.get_rank() == 1 else None
    error = rw.InvalidArgumentError if wrong else rw.RemoteRankError
    with pytest.raises(error, match="progress must be a function of two integers, or None; got 7"):
        CALLS[name](1, progress=wrong)
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))


def test_gradients_flow_through_calls_with_it(comm: Comm) -> None:
    told: list[int] = []
    tensor = large().requires_grad_()
    parts = rw.all_gather(tensor, differentiable=True, progress=lambda done, _: told.append(done))
    torch.stack(parts).sum().backward()
    assert tensor.grad is not None
    assert told[-1] >= (comm.size - 1) * NBYTES
    assert (tensor.grad == comm.size).all()
