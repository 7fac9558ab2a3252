"""Joins, and calls collectives of each kind."""

from pathlib import Path

import torch

import rankwise as rw


def train() -> None:
    with rw.init():
        rank, size = rw.get_rank(), rw.get_world_size()
        rw.barrier()
        assert rw.all_reduce(torch.ones(2)).tolist() == [size, size]
        assert rw.all_reduce({"loss": 1.0}) == {"loss": float(size)}
        assert rw.all_gather({"rank": rank, "tensor": torch.ones(3000)})[1]["rank"] == 1
        assert rw.broadcast("value" if rank == 0 else None) == "value"
        model = torch.nn.Linear(2, 1)
        rw.sync_params(model)
        model(torch.ones(2)).sum().backward()
        rw.sync_grads(model.parameters())
        assert rw.all_reduce(1, async_op=True).wait() == size
        print("joined with", Path(rw.__file__).parents[1], flush=True)


if __name__ == "__main__":
    train()
