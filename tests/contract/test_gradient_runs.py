"""Longer runs with buckets of gradients: bits, memory, and ranks that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from tests.contract.test_gradient_buckets import Momentum, Net, filled, loss


@pytest.mark.ranks(2, 3)
@pytest.mark.slow_with_ranks(3)
@pytest.mark.usefixtures("torch_random")
@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_have_the_same_bits_after_200_steps(comm: Any, overlap: bool) -> None:
    model = filled(Net())
    optimizer = Momentum(model.parameters())
    for step in range(200):
        optimizer.zero_grad()
        loss(model, torch.arange(comm.rank + step, comm.rank + step + 24.0).cos().reshape(6, 4)).backward()
        rw.sync_grads(model, overlap=overlap, bucket_mb=0.05)
        optimizer.step()
    rw.assert_synced(model)


def peak() -> int:
    """Return the largest memory of this process in bytes, and begin to measure anew."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) << 10


def extra_bytes_of_steps(bucket_mb: int) -> list[int]:
    with rw.init(timeout=100.0):
        weights = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(24)]
        bucket = torch.ones(bucket_mb << 18)

        def peak_of(steps: int, *, sync: bool) -> int:
            peak()
            for _ in range(steps):
                for weight in weights:
                    weight.grad = None
                for weight in weights:
                    (weight * 2).sum().backward()
                if sync:
                    rw.sync_grads(weights, bucket_mb=bucket_mb)
                else:
                    rw.all_reduce_(bucket)
            return peak()

        without = peak_of(2, sync=False)
        return [peak_of(steps, sync=True) - without for steps in (1, 3)]


@pytest.mark.slow
def test_buckets_take_the_place_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory of their own: pages that ranks share count for each of them."""
    monkeypatch.setenv("RANKWISE_SHARED_MEMORY", "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # so that the C library keeps no freed tensors
    for of_rank in rw.launch(extra_bytes_of_steps, 8, nproc=2):
        # Less than one of the 12 buckets beside the gradients, which have 96 MiB.
        assert max(of_rank) < 8 << 20


def train_and_die(overlap: bool) -> None:
    with rw.init(timeout=100.0):
        model = filled(Net())
        for step in range(4):
            model.zero_grad()
            loss(model, torch.ones(6, 4)).backward()
            if step == 3 and rw.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            rw.sync_grads(model, overlap=overlap, bucket_mb=0.05)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_named(overlap: bool) -> None:
    with pytest.raises(rw.RankFailedError, match=r"rank 1.*SIGKILL"):
        rw.launch(train_and_die, overlap, nproc=2)
