"""Ranks gather values of 240 MB, some of them in a control group for which that is too much, and print their errors."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

import rankwise as rw

torch.set_num_threads(1)


def attempt(call: Callable[[], object]) -> None:
    try:
        call()
    except (MemoryError, rw.RankwiseError) as error:
        print(f"{type(error).__name__} {error}".splitlines()[0])
    else:
        print("works")


with rw.init(timeout=100):
    rw.barrier()
    if os.environ["GROUP"]:
        Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    value = torch.ones(60_000_000)
    rw.barrier()
    for _ in range(2):
        attempt(lambda: rw.all_gather(value))
    attempt(lambda: rw.broadcast(value))
    print(rw.all_reduce(1))
