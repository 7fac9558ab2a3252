"""Ranks run random collectives, the same on each, until one of them is killed; the others print the error they got."""

import os
import random
import signal
import sys
import threading

import torch

import rankwise as rw

victim, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
draw = random.Random(seed)  # noqa: S311 - the same calls on all ranks


def call() -> None:
    """Run one collective."""
    rank, size = rw.get_rank(), rw.get_world_size()
    kind, length, root = draw.randrange(9), draw.choice([0, 1, 1000, 300_000]), draw.randrange(size)
    if kind == 0:
        rw.all_reduce(torch.ones(length), op=draw.choice(["sum", "mean", "max"]))
    elif kind == 1:
        rw.all_gather(torch.ones(length + rank))
    elif kind == 2:
        rw.all_gather({"rank": rank, "text": "x" * length})
    elif kind == 3:
        rw.broadcast("x" * length, src=root)
    elif kind == 4:
        rw.gather(torch.ones(length), dst=root)
    elif kind == 5:
        rw.scatter([torch.ones(length)] * size, src=root)
    elif kind == 6:
        rw.reduce_scatter([torch.ones(length)] * size)
    elif kind == 7:
        rw.barrier()
    else:
        with rw.new_group(sorted(draw.sample(range(size), 2))) as group:
            if rank in group.ranks:
                rw.all_reduce(torch.ones(length), group=group)


try:
    with rw.init(timeout=280):
        rw.barrier()
        if rw.get_rank() == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            call()
except rw.RankwiseError as error:
    os.write(1, f"{type(error).__name__} {error}\n".encode())
    sys.exit(1)
