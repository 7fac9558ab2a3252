"""Two ranks share a core: ranks 1 and 2 may run on one core only, so that rank 0 waits for both in each step.

Run with: torchrun --nproc-per-node 3 examples/broken/shared_core.py
"""

import os
import sys

import torch
import torch.distributed as dist


def main(steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if dist.get_rank() else cores[-1]})
    print("training", flush=True)
    for _ in range(steps):
        gradient = torch.ones(300, 300)
        for _ in range(200):
            gradient = gradient @ torch.eye(300)
        dist.all_reduce(gradient)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
