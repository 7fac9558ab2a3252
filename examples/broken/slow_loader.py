"""A slow data loader: the worker of rank 1 reads its samples much more slowly than those of the other ranks.

Run with: torchrun --nproc-per-node 3 examples/broken/slow_loader.py
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

SECONDS_TO_READ = 1.0


class Images(Dataset[torch.Tensor]):
    """Samples on a disk that is slow for one rank."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank = rank
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.steps:
            raise IndexError
        if self.rank == 1:
            time.sleep(SECONDS_TO_READ)
        return torch.ones(1000)


def main(steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print("training", flush=True)
    for sample in DataLoader(Images(dist.get_rank(), steps), num_workers=1):
        gradient = torch.ones(1000, 1000) @ torch.ones(1000, 1000) * sample
        dist.all_reduce(gradient)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
