"""Train a linear model, as mmcv's users do: a launcher's name on the command line, gradients averaged by hand."""

import argparse
import os

import torch
from mmcv.runner import allreduce_grads, allreduce_params, get_dist_info, init_dist, master_only
from torch import nn


@master_only  # type: ignore[untyped-decorator]  # the original has no types
def show(text: str) -> None:
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi", "auto"], default="none")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.launcher != "none":
        init_dist(args.launcher, backend="nccl")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        print("told", *(os.environ[name] for name in names))
    rank, world_size = get_dist_info()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(64, 4)[rank::world_size]
    for _ in range(50):
        loss = (model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        allreduce_grads(model.parameters())
        optimizer.step()
    allreduce_params(model.buffers())
    assert model[1].num_batches_tracked == 50
    show(f"rank {rank} of {world_size}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
