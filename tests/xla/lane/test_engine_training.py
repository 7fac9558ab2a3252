"""A training loop on XLA devices: its results, and how many graphs it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.debug import metrics
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

import rankwise as rw
from tests.xla.device_ranks import DEVICES

pytestmark = pytest.mark.ranks(1, 2, 4)


def count(metric: str) -> int:
    """Return how many graphs this process has compiled (CompileTime) or executed (ExecuteTime), on all devices."""
    data = metrics.metric_data(metric)
    return 0 if data is None else int(data[0])


def model_of(rank: int) -> torch.nn.Module:
    weights = torch.Generator().manual_seed(rank)
    first, last = (torch.nn.utils.skip_init(torch.nn.Linear, *sizes) for sizes in ((6, 8), (8, 1)))
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=weights) - 0.5)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def step(model: torch.nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
    loss = torch.stack([model(part).square().mean() for part in data]).mean()
    loss.backward()
    return loss


def test_a_step_compiles_nothing_from_the_second_one_on(session: rw.Session) -> None:
    torch.set_default_device("cpu")  # for the batches
    model = model_of(session.rank).to(session.device)
    rw.sync_params(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, losses = [], []
    for number in range(5):
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(model, [batch(session.rank, number).to(session.device)]).detach())
        rw.sync_grads(model)
        optimizer.step()
        torch_xla.sync()
        rw.barrier()
        counts.append(count("CompileTime"))
        rw.barrier()
    assert counts[1:] == [counts[1]] * 4, "those of the first step are used again"
    assert counts[0] == counts[1]
    expected = model_of(0)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(5):
        reference.zero_grad()
        step(expected, [batch(rank, number) for rank in range(DEVICES)])
        reference.step()
    for own, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), parameter)
    assert all(float(loss) > 0 for loss in losses)


def test_sync_grads_executes_the_steps_of_a_loop_that_does_not(session: rw.Session) -> None:
    torch.set_default_device("cpu")  # for the batches
    model = model_of(session.rank).to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for number in range(4):
        optimizer.zero_grad()
        step(model, [batch(session.rank, number).to(session.device)])
        rw.sync_grads(model)
        optimizer.step()
        xm.wait_device_ops()
        counts.append(count("ExecuteTime"))
        rw.barrier()
    assert counts == sorted(set(counts)), "each step is executed, and does not become a part of the next one"


def test_modules_of_fsdp_are_refused(session: rw.Session) -> None:
    """Each rank has a part of their parameters, of the same shape, so that a copy or a mean would destroy them."""
    model = torch.nn.Sequential(XlaFullyShardedDataParallel(model_of(0).to(session.device)), torch.nn.ReLU())
    calls: tuple[Any, ...] = (rw.sync_grads, rw.sync_params, rw.assert_synced)
    for call in calls:
        for part in (model, model[0]):
            with pytest.raises(rw.InvalidArgumentError, match="XlaFullyShardedDataParallel"):
                call(part)
    rw.barrier()
