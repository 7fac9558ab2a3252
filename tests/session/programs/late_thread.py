"""Close a session while a thread of the group that a DDP model holds has something left to give back."""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw


def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, and keep the thread that did it busy for a moment, without Python's lock."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)
    future = work.get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0] / rw.get_world_size())
    future.add_done_callback(lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000))
    return averaged


with rw.init(timeout=100.0):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(None, average)
    model(torch.full((1, 2), float(rw.get_rank()))).sum().backward()
    print("synced")
