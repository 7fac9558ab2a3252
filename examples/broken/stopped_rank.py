"""A stopped rank: something has sent SIGSTOP to rank 1, here the rank itself, between two collectives.

Run with: torchrun --nproc-per-node 3 examples/broken/stopped_rank.py
"""

import os
import signal

import torch
import torch.distributed as dist


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("training", flush=True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
