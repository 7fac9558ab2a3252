"""Ranks keep values that rank 1 has sent; then it is killed, and the others leave: the values stay as they were."""

import gc
import os
import signal

import torch
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw

LENGTH = 300_000


def collect(_: int) -> None:
    gc.collect()


torch.set_num_threads(1)
gc.collect()
gc.disable()
with rw.init(timeout=100) as session:
    values = rw.all_gather(torch.full((LENGTH,), float(session.rank)))
    text = rw.broadcast("x" * 2_000_000 if session.rank == 1 else None, src=1)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        rw.barrier()
    except rw.CollectiveError as error:
        print(error)
    values[1].add_(1)
    rw.finalize()
loader = DataLoader(
    TensorDataset(*values),
    batch_size=LENGTH // 4,
    num_workers=2,
    multiprocessing_context="fork",
    worker_init_fn=collect,  # frees what the session has left, such as a store with a thread
)
print(*[torch.cat(parts).mean().item() for parts in zip(*loader, strict=True)], len(text or ""))
