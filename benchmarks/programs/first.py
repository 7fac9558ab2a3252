"""A script that joins with torch alone, reduces once, and prints when; `spawn` starts its own ranks."""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

if "sklearn" in sys.argv:
    import sklearn.linear_model  # noqa: F401 - the import is measured


def reduce_once() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    os.write(1, f"{time.time()}\n".encode())
    dist.destroy_process_group()


def spawned(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))
    os.write(1, f"{time.time()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        with tempfile.TemporaryDirectory() as folder:
            nproc = int(sys.argv[2])
            torch.multiprocessing.spawn(spawned, (nproc, f"{folder}/store"), nproc)
    else:
        reduce_once()
