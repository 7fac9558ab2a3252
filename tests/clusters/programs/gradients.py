"""Train on two hosts with several ranks each, and compare with one process on the whole of each batch."""

from __future__ import annotations

import pytest
import torch

import rankwise as rw

BATCH, STEPS, WIDTH = 12, 4, 200


class Net(torch.nn.Module):
    """A model with gradients for several buckets, and one that no rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(4, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.unused = torch.nn.Parameter(torch.zeros(3))
        self.last = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.wide(x)))))
        return result


def trained(*, is_whole: bool) -> Net:
    """Return a model after some steps, with the whole of each batch or with the part of this rank."""
    torch.manual_seed(3)
    model = Net()
    for step in range(STEPS):
        x = torch.arange(step, step + BATCH * 4.0).cos().reshape(BATCH, 4)
        model.zero_grad()
        model(x if is_whole else x[rw.get_rank() :: rw.get_world_size()]).pow(2).mean().backward()
        if not is_whole:
            rw.sync_grads(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.2)
    return model


def check_training() -> None:
    whole, own = trained(is_whole=True), trained(is_whole=False)
    for (name, expected), found in zip(whole.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    assert own.unused.grad is None
    rw.assert_synced(own)


def check_missing() -> None:
    """One rank of the other host lacks a gradient."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    last = rw.get_world_size() - 1
    if rw.get_rank() != last:
        parameter.grad = torch.ones(2)
    with pytest.raises(rw.CollectiveError, match=f"rank {last}"):
        rw.sync_grads([parameter], missing="error")


def check_large_tensors() -> None:
    rank, size = rw.get_rank(), rw.get_world_size()
    total = size * (size + 1) // 2
    for numel in (10, 20_000, 300_000):
        tensor = torch.full((numel,), float(rank + 1))
        assert rw.all_reduce_(tensor) is tensor
        assert (tensor == total).all()
        works = [rw.all_reduce(torch.full((numel,), float(rank + 1)), async_op=True) for _ in range(3)]
        assert all((work.wait() == total).all() for work in works)


def main() -> None:
    torch.set_num_threads(1)
    with rw.init(timeout=100):
        check_training()
        check_missing()
        check_large_tensors()
        print("done", flush=True)


if __name__ == "__main__":
    main()
