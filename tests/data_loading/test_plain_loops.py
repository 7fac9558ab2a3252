"""Loops of other libraries with the parts of rankwise.data, which wrap nothing: of DDP, and of PyTorch-Ignite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw
from rankwise.data import GlobalBatches, in_order, in_step
from tests.compat.ignite.original import ignite

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("session", "torch_random")]

LENGTH = 22
# The parts of ranks are alike but for the last batch, of 2 samples, one for each.
BATCH_SIZE = 4


@pytest.fixture(autouse=True)
def inductor_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variable that optimizers set otherwise, when they load parts of torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def dataset() -> TensorDataset:
    inputs = torch.arange(2.0 * LENGTH).view(LENGTH, 2) / LENGTH
    return TensorDataset(torch.arange(LENGTH), inputs, inputs.sum(dim=1, keepdim=True))


def trained_alone(epochs: int) -> torch.nn.Linear:
    """Return the model after training in one process, on the same global batches."""
    model, data = fresh_model(), dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = GlobalBatches(LENGTH, BATCH_SIZE, seed=3)
    for _ in range(epochs):
        for batch in sampler._batches_of(0, 1):
            _, inputs, targets = data[batch]
            step(model, optimizer, inputs, targets)
    return model


def fresh_model() -> torch.nn.Linear:
    with rw.same_seed(1):
        return torch.nn.Linear(2, 1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def test_a_plain_ddp_loop_trains_as_one_process_and_is_evaluated_in_order() -> None:
    model = DistributedDataParallel(fresh_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = GlobalBatches(LENGTH, BATCH_SIZE, seed=3)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    seen: list[int] = []
    for _ in range(2):
        for indices, inputs, targets in in_step(loader):
            seen += indices.tolist()
            step(model, optimizer, inputs, targets)
    assert sorted(rw.all_reduce(torch.bincount(torch.tensor(seen), minlength=LENGTH)).tolist()) == [2] * LENGTH
    assert sampler.state_dict()["position"] == 2 * LENGTH
    alone = trained_alone(2)
    torch.testing.assert_close(model.module.weight, alone.weight)

    evaluated = GlobalBatches(LENGTH, BATCH_SIZE, shuffle=False)
    places, outputs = [], []
    with torch.no_grad():
        for indices, inputs, _ in in_step(DataLoader(dataset(), batch_sampler=evaluated)):
            places.append(indices)
            outputs.append(model.module(inputs))
        found = in_order(torch.cat(places), torch.cat(outputs), total=LENGTH)
        torch.testing.assert_close(found, alone(dataset().tensors[1]))


def test_a_loop_of_ignite_counts_its_steps_with_trained() -> None:
    """The engine iterates over the loader by itself, once an epoch."""
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = GlobalBatches(LENGTH, BATCH_SIZE, seed=3)

    def update(_: object, batch: Any) -> list[int]:
        indices, inputs, targets = batch
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        rw.sync_grads(model)
        optimizer.step()
        sampler.trained()
        seen.extend(indices.tolist())
        return seen

    seen: list[int] = []
    ignite.engine.Engine(update).run(DataLoader(dataset(), batch_sampler=sampler), max_epochs=2)
    assert rw.all_reduce(torch.bincount(torch.tensor(seen), minlength=LENGTH)).tolist() == [2] * LENGTH
    assert sampler.state_dict()["position"] == 2 * LENGTH
    torch.testing.assert_close(model.weight, trained_alone(2).weight)
