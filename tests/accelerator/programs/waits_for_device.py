"""Rank 1 ends after the ranks have agreed, before it moves data: rank 0 waits for its device, in `item()`."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import rankwise as rw


def end(*_: object, **__: object) -> None:
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("no space left")


with rw.init(timeout=100.0) as session:
    x = torch.ones(3, device=session.device)
    rw.all_reduce(x).sum().item()
    if session.rank == 1:
        dist.all_reduce = end
    y = rw.all_reduce(x)
    try:
        print(y.sum().item())
    except RuntimeError as error:
        print(f"the device: {error}".splitlines()[0])
    rw.barrier()
