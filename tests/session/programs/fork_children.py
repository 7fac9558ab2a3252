"""A rank forks children in every way, with groups of its own and of others open and gone; none of them may hang.

Python warns of a fork with several threads, and the garbage collector of a child may free what its parent has left.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw

SECONDS = 10.0


def end(child: int, what: str) -> None:
    """Wait for a child, which a timer ends that hangs."""
    timer = threading.Timer(SECONDS, os.kill, (child, 9))
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    timer.join()
    if status:
        print(f"{what}: a child ended with {status}", flush=True)


def fork(body: Callable[[], object], what: str) -> None:
    """Fork a child that ends as those of multiprocessing do: what torch does at an interpreter's end may hang."""
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    end(child, what)


def check(what: str) -> None:
    rank = rw.get_rank()
    fork(lambda: rw.get_rank() == rank or os._exit(3), what)
    fork(rw.finalize, f"{what}, finalize")
    fork(gc.collect, f"{what}, garbage")
    fork(lambda: fork(rw.get_rank, f"{what}, grandchild"), f"{what}, child")
    if dist.is_initialized():
        fork(dist.destroy_process_group, f"{what}, destroy")
    thread = threading.Thread(target=fork, args=(rw.get_rank, f"{what}, thread"))
    thread.start()
    thread.join()
    process = multiprocessing.get_context("fork").Process(target=rw.get_rank)
    process.start()
    end(process.pid or 0, f"{what}, multiprocessing")


def main() -> None:
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.collect()
    gc.disable()
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for turn in range(2):
        store = dist.TCPStore("127.0.0.1", port + 1 + turn, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        del store
        assert rw.all_reduce(1) == world_size
        if turn:
            check("a foreign group")
        dist.destroy_process_group()
        fork(rw.get_rank, "a foreign group that is gone")  # before this process looks again
        check("a foreign group that is gone")
    with rw.init(device="cpu") as session:
        part = rw.new_group([1])
        dist.new_group([0])
        check("a session")
        fork(lambda: session.__exit__(SystemExit, SystemExit(3), None), "leaves the block of its parent")
        data = TensorDataset(torch.arange(4))
        loader = DataLoader(data, collate_fn=len, num_workers=2, multiprocessing_context="fork")
        assert list(loader) == [1, 1, 1, 1]
        rw.barrier()
        if rank == 1:
            rw.barrier(group=part)
    check("a session that is closed")


main()
