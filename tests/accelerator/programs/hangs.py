"""Ranks reduce with torch and wait for their devices; rank 1 leaves that loop, and sleeps."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import rankwise as rw

with rw.init(timeout=60) as session:
    for step in range(3):
        if step == 2 and session.rank == 1:
            time.sleep(60)
        total = torch.ones(1000, device=session.device)
        dist.all_reduce(total)
        print(total.sum().item(), flush=True)
