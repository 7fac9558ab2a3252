"""Ranks reduce and exchange large tensors through shared memory, until one is killed; the others print their error.

Arguments: the rank that is killed, the seconds until then, and a seed.
"""

import os
import random
import signal
import sys
import threading

import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of

victim, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
draw = random.Random(seed)  # noqa: S311 - the same calls on all ranks
parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (1_000, 100_000, 1_000_000)]


def call() -> None:
    length, comm = draw.choice([2_000, 100_000, 1_000_000, 5_000_000]), comm_of(None)
    kind = draw.randrange(8)
    if kind == 0:
        assert (rw.all_reduce_(torch.ones(length)) == comm.size).all()
    elif kind == 1:
        assert (rw.reduce_scatter([torch.ones(length // comm.size)] * comm.size) == comm.size).all()
    elif kind == 2:
        assert rw.all_gather_cat(torch.ones(length)).sum(dtype=torch.float64) == comm.size * length
    elif kind == 3:
        works = [rw.all_reduce_(torch.ones(length), async_op=True) for _ in range(draw.randrange(1, 4))]
        assert all((work.wait() == comm.size).all() for work in works)
    elif kind == 4:
        tensors = [torch.ones(length // 7 + number) for number in range(9)]
        assert all((one == comm.size).all() for one in rw.all_reduce_(tensors))
    elif kind == 5:
        step()
    elif kind == 6:
        pieces = rw.all_to_all([torch.full((length + dst,), rw.get_rank()) for dst in range(comm.size)])
        assert all((piece == src).all() for src, piece in enumerate(pieces))
    else:
        pieces = [torch.full((length + dst,), dst) for dst in range(comm.size)]
        assert torch.equal(rw.scatter(pieces if comm.rank == 0 else None), pieces[rw.get_rank()])


def step() -> None:
    """Average gradients."""
    for parameter in parameters:
        parameter.grad = None
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    rw.sync_grads(parameters)
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in parameters)


try:
    with rw.init(timeout=280):
        rw.barrier()
        assert comm_of(None).planes.shared_memory is not None
        if rw.get_rank() == victim:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            call()
except rw.RankwiseError as error:
    os.write(1, f"{type(error).__name__} {error}\n".encode())
    sys.exit(1)
