"""Plain DDP, as a user writes it, without rankwise: a rank hangs after two steps. The rank, how, workers, their start.

The rank is that of whatever has started the process.
"""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

VICTIM, HOW = int(sys.argv[1]), sys.argv[2]
WORKERS, START = int(sys.argv[3]) if len(sys.argv) > 3 else 0, sys.argv[4] if len(sys.argv) > 4 else "fork"
STEPS = 6


def number(*names: str) -> int:
    """Return the first of some variables."""
    return next(int(os.environ[name]) for name in names if name in os.environ)


RANK = number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
WORLD_SIZE = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


class Images(Dataset[torch.Tensor]):
    """Samples, of which one rank cannot read the third."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if RANK == VICTIM and HOW == "loader" and index == 2:
            time.sleep(600)  # it does not come
        return torch.ones(4)


def hang() -> None:
    """Do not return."""
    if HOW == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while HOW == "lock":
        ctypes.PyDLL(None).sleep(600)


def train(model: torch.nn.Module) -> None:
    """Train, and leave the loop early on one rank."""
    context = START if WORKERS else None
    loader = DataLoader(Images(), batch_size=None, num_workers=WORKERS, multiprocessing_context=context)
    for step, images in enumerate(loader):
        if RANK == VICTIM and step == 2:
            if HOW == "skips":
                return
            hang()
        model(images).sum().backward()
        if step == 1:
            print("training", flush=True)


def main() -> None:
    """Join, and train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD_SIZE)
    train(DistributedDataParallel(torch.nn.Linear(4, 1)))
    dist.barrier()


if __name__ == "__main__":
    main()
