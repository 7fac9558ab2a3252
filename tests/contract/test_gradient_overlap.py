"""Gradients that are reduced during backward: the same values, and errors that leave no rank waiting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._training.gradient_layout import layout_of
from tests.contract.test_gradient_buckets import Net, batches, compare, filled, loss

pytestmark = [
    pytest.mark.ranks("serial", 2, 3),
    pytest.mark.slow_with_ranks(3),
    pytest.mark.usefixtures("torch_random", "no_thread_stays"),
]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_training_is_that_of_one_process(comm: Any, op: str) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        (loss(model, x) / (comm.size if op == "sum" and len(x) < 12 else 1)).backward()
        assert rw.all_reduce(1) == comm.size, "collectives in between do not matter"
        sync()
        optimizer.step()

    model = compare(comm, step, overlap=True, bucket_mb=0.05, op=op)
    layout = layout_of(model.last.bias)
    if layout is None:
        assert model.last.bias.device.type == "xla", "reduced as copies"
        return
    assert layout.overlap is not None
    assert layout.overlap.is_ordered
    assert layout.names[layout.buckets[0].plan.indices[0]].startswith("last"), "the order is that of backward"


def test_buckets_start_in_backward(comm: Any) -> None:
    model = filled(Net())
    for number, x in enumerate(batches()):
        model.zero_grad()
        loss(model, x[comm.rank :: comm.size]).backward()
        layout = layout_of(model.last.bias)
        if number:
            assert layout is not None
            assert layout.overlap is not None
            assert layout.overlap.started == len(layout.buckets)
        rw.sync_grads(model, overlap=True)
    rw.release_grads(model)
    rw.sync_grads(model)


def test_accumulation(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        optimizer.zero_grad()
        first, last = x.chunk(2)
        with rw.no_sync(model):
            (loss(model, first) * len(first) / len(x)).backward()
        (loss(model, last) * len(last) / len(x)).backward()
        sync()
        optimizer.step()

    compare(comm, step, overlap=True)
    model = filled(Net())
    for x in batches()[:2]:
        model.zero_grad()
        loss(model, x).backward()
        rw.sync_grads(model, overlap=True)
    loss(model, x).backward()
    with pytest.raises(rw.CollectiveError, match=r"gradient of .*put all but the last backward\(\) of a step into"):
        loss(model, x).backward()
    rw.sync_grads(model, overlap=True)
    for _ in range(2):
        model.zero_grad()
        loss(model, x).backward()
        rw.sync_grads(model, overlap=True)


def test_gradients_that_come_and_go(comm: Any) -> None:
    weights: list[Any] = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 40_000, 5)]
    for number in range(5):
        for index, weight in enumerate(weights):
            weight.grad = None
            if index != 1 or (comm.rank + number) % comm.size == 0:
                (weight * (1.0 + number)).sum().backward()
        rw.sync_grads(weights, overlap=True, bucket_mb=1e-4)
        for index, weight in enumerate(weights):
            expected = (1.0 + number) / (comm.size if index == 1 else 1)
            torch.testing.assert_close(weight.grad, torch.full_like(weight, expected).detach())


def test_frozen_parameters_and_other_options(comm: Any) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, sync: Callable[[], None]) -> None:
        number = model.__dict__["number"] = model.__dict__.get("number", -1) + 1
        model.wide.requires_grad_(number != 2)
        optimizer.zero_grad()
        loss(model, x).backward()
        sync()
        optimizer.step()

    compare(comm, step, overlap=True)
    model = filled(Net())
    for number, x in enumerate([*batches(), *batches()]):
        model.zero_grad()
        loss(model, x[comm.rank :: comm.size]).backward()
        rw.sync_grads(model, overlap=number % 3 != 2, op="sum" if number == 4 else "mean")
        rw.assert_synced([parameter.grad for parameter in model.parameters()])


def test_a_changed_gradient_is_an_error(comm: Any) -> None:
    model = filled(Net())
    for _ in range(2):
        model.zero_grad()
        loss(model, batches()[0]).backward()
        rw.sync_grads(model, overlap=True)
    model.zero_grad()
    loss(model, batches()[0]).backward()
    model.last.bias.grad = torch.ones(2)
    with pytest.raises(rw.CollectiveError, match=r"gradient of last\.bias was replaced or set to None"):
        rw.sync_grads(model, overlap=True)
    works_again(comm, model)


def works_again(comm: Any, model: Any) -> None:
    assert rw.all_reduce(1) == comm.size
    for x in batches():
        model.zero_grad()
        loss(model, x[comm.rank :: comm.size]).backward()
        rw.sync_grads(model, overlap=True)
        rw.assert_synced([parameter.grad for parameter in model.parameters()])


def test_a_rank_that_raises_in_backward(comm: Any) -> None:
    model = filled(Net())
    works_again(comm, model)
    if comm.size == 1:
        return
    odd = comm.rank == 1

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no gradient")

    handle = model.first.bias.register_hook(fail) if odd else None
    model.zero_grad()
    if handle is not None:
        with pytest.raises(ValueError, match="no gradient"):
            loss(model, batches()[0]).backward()
        handle.remove()
        with pytest.raises(rw.MismatchError, match=r"all_reduce.*sync_grads|sync_grads.*all_reduce"):
            rw.all_reduce(1)
    else:
        loss(model, batches()[0]).backward()
        with pytest.raises(rw.MismatchError, match=r"all_reduce.*sync_grads|sync_grads.*all_reduce"):
            rw.sync_grads(model, overlap=True)
    works_again(comm, model)


def test_a_rank_that_repeats_a_backward_that_raised(comm: Any) -> None:
    """Its second one is not reduced with the buckets that the others started in their first."""
    model = filled(Net())
    works_again(comm, model)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no gradient")

    x = batches()[0][comm.rank :: comm.size]
    model.zero_grad()
    if comm.rank == 1:
        handle = model.first.bias.register_hook(fail)
        with pytest.raises(ValueError, match="no gradient"):
            loss(model, x).backward()
        handle.remove()
        model.zero_grad()
    loss(model, x).backward()
    layout = layout_of(model.last.bias)
    if comm.rank == 1 and layout is not None:
        assert layout.overlap is not None
        assert layout.overlap.lost
    rw.sync_grads(model, overlap=True)
    expected = filled(Net())
    loss(expected, batches()[0]).backward()
    for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, msg=name)
    works_again(comm, model)


def test_other_parameters_and_copies_on_one_rank(comm: Any) -> None:
    model = filled(Net())
    works_again(comm, model)
    if comm.size == 1:
        return
    odd = comm.rank == 1
    model.zero_grad()
    loss(model, batches()[0]).backward()
    with pytest.raises(rw.MismatchError, match=r"is float32\[.*(?s:.*)sync_grads.*test_gradient_overlap.py"):
        rw.sync_grads(model.last if odd else model, overlap=True)
    works_again(comm, model)
    used = copy.deepcopy(model) if odd else model
    used.zero_grad()
    loss(used, batches()[0]).backward()
    rw.sync_grads(used, overlap=True)
    rw.assert_synced([parameter.grad for parameter in used.parameters()])
    works_again(comm, used)


def test_a_group_of_some_ranks_is_refused(comm: Any) -> None:
    if comm.size == 1:
        return
    with rw.new_group([0]) as group:
        if comm.rank == 0:
            with pytest.raises(rw.InvalidArgumentError, match="overlap=True is for all ranks"):
                rw.sync_grads(torch.nn.Linear(1, 1), overlap=True, group=group)
    with rw.new_group([0]) as group:
        assert rw.all_reduce(1) == comm.size, "the ranks have the same number of groups"
    with pytest.raises(rw.InvalidArgumentError, match="overlap=1"):
        rw.sync_grads(torch.nn.Linear(1, 1), overlap=1)  # type: ignore[arg-type]  # that is the point
