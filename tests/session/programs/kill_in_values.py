"""Ranks exchange values that they map, until one of them is killed; the others print the error they got.

They then drop their results, and print how many values they still have mapped. Arguments: the rank that is killed, the
seconds until then, and a seed.
"""

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rankwise as rw

victim, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
draw = random.Random(seed)  # noqa: S311 - the same calls on all ranks
kept: list[Any] = []


def call() -> None:
    """Run one collective, and keep what some of them return."""
    rank, size = rw.get_rank(), rw.get_world_size()
    root, length = draw.randrange(size), draw.choice([300_000, 1_000_000, 4_000_000])
    kind, some = draw.randrange(3), draw.randrange(size)
    value: Any = [torch.full((length,), float(rank)), "x" * length, [bytearray(length)] * 2][kind]
    if draw.random() < 0.3 and rank != some:
        value = rank  # a small one
    calls: list[Callable[[], Any]] = [
        lambda: rw.all_gather(value),
        lambda: rw.all_gather(value, async_op=True).wait(),
        lambda: rw.gather(value, dst=root),
        lambda: rw.broadcast(value if rank == root else None, src=root),
        lambda: rw.scatter([value] * size if rank == root else None, src=root),
    ]
    kept.append(draw.choice(calls)())
    del kept[: -draw.randrange(1, 4)]


try:
    with rw.init(timeout=280):
        rw.barrier()
        if rw.get_rank() == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            call()
except rw.RankwiseError as error:
    text = f"{type(error).__name__} {error}"
kept.clear()
gc.collect()  # the error had what the call had mapped
files = Path("/proc/self/maps").read_text().count("memfd:rankwise: a value")
os.write(1, f"{files} {text}\n".encode())
sys.exit(1)
