"""A script that joins with torch alone, reduces once, and prints when; `spawn` starts its own ranks."""

import os
import sys
import tempfile
import time

import psutil
import torch
import torch.distributed as dist

if "sklearn" in sys.argv:
    import sklearn.linear_model  # noqa: F401 - the import is measured


def reduce_once() -> None:
    dist.init_process_group("gloo")
    report()


def spawned(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    report()


def report() -> None:
    """Reduce, and print when; rank zero also the memory of all processes that the benchmark has started, in bytes."""
    dist.all_reduce(torch.ones(1))
    os.write(1, f"{time.time()}\n".encode())
    if "memory" in sys.argv:
        dist.barrier()
        if dist.get_rank() == 0:
            started = psutil.Process(int(os.environ["BENCHMARK"])).children(recursive=True)
            os.write(1, f"memory {sum(process.memory_full_info().pss for process in started)}\n".encode())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        with tempfile.TemporaryDirectory() as folder:
            nproc = int(sys.argv[2])
            torch.multiprocessing.spawn(spawned, (nproc, f"{folder}/store"), nproc)
    else:
        reduce_once()
