"""Each rank waits for its device, for a reduction in a group in which the other one makes none."""

from __future__ import annotations

import torch
import torch.distributed as dist

import rankwise as rw

with rw.init(timeout=60) as session:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x = torch.ones(10, device=session.device)
    dist.all_reduce(x)
    x.sum().item()
    print("waits", flush=True)
    dist.all_reduce(x, group=groups[session.rank])
    x.sum().item()
