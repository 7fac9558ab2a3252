"""Longer runs with synchronized gradients: bits, and ranks that die."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import rankwise as rw
from tests.contract.test_gradients import Momentum, Net, filled, loss


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("torch_random")
def test_all_ranks_have_the_same_bits_after_200_steps(comm: Any) -> None:
    model = filled(Net())
    optimizer = Momentum(model.parameters())
    for step in range(200):
        optimizer.zero_grad()
        loss(model, torch.arange(comm.rank + step, comm.rank + step + 24.0).cos().reshape(6, 4)).backward()
        rw.sync_grads(model)
        optimizer.step()
    rw.assert_synced(model)


def train_and_die() -> None:
    with rw.init(timeout=100.0):
        model = filled(Net())
        for step in range(4):
            model.zero_grad()
            loss(model, torch.ones(6, 4)).backward()
            if step == 3 and rw.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            rw.sync_grads(model)


@pytest.mark.slow
def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(rw.RankFailedError, match=r"rank 1.*SIGKILL"):
        rw.launch(train_and_die, nproc=2)
