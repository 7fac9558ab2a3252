"""Ranks run random collectives, the same on each, until one of them is killed; the others print the error they got.

With a further argument, some of the calls are non-blocking.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import rankwise as rw

victim, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
draw = random.Random(seed)  # noqa: S311 - the same calls on all ranks
non_blocking = len(sys.argv) > 4
pending: list[rw.Work[Any]] = []


def call() -> None:
    """Run one collective, blocking or not, and perhaps wait for some of those that are pending."""
    rank, size = rw.get_rank(), rw.get_world_size()
    length, root = draw.choice([0, 1, 1000, 300_000]), draw.randrange(size)
    op, members = draw.choice(["sum", "mean", "max"]), sorted(draw.sample(range(size), 2))
    more: Any = {"async_op": draw.random() < 0.5} if non_blocking else {}
    calls: list[Callable[[], object]] = [
        lambda: rw.all_reduce(torch.ones(length), op=op, **more),
        lambda: rw.reduce(torch.ones(length), op=op, dst=root),
        lambda: rw.all_gather(torch.ones(length + rank), **more),
        lambda: rw.all_gather({"rank": rank, "text": "x" * length}, **more),
        lambda: rw.broadcast("x" * length, src=root, **more),
        lambda: rw.gather(torch.ones(length), dst=root, **more),
        lambda: rw.scatter([torch.ones(length)] * size, src=root, **more),
        lambda: rw.all_to_all([torch.ones(length + other) for other in range(size)]),
        lambda: rw.reduce_scatter([torch.ones(length)] * size, **more),
        lambda: rw.barrier(**more),
        lambda: reduce_in_group(members, length, more),
    ]
    work = draw.choice(calls)()
    if isinstance(work, rw.Work):
        pending.append(work)
    while pending and draw.random() < 0.4:
        pending.pop(draw.randrange(len(pending))).wait()


def reduce_in_group(members: list[int], length: int, more: Any) -> None:
    with rw.new_group(members) as group:
        if rw.get_rank() in members:
            rw.all_reduce(torch.ones(length), group=group, **more)


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
