"""Join, and use process groups of torch that the program, torch and rankwise make: all of them have to connect."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import rankwise as rw
from rankwise.extend._dropins import new_process_group

with rw.init(timeout=100) as session:
    ranks = list(range(rw.get_world_size()))
    own = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=30))
    made = new_process_group(ranks, session)
    totals = []
    for group in (own, made, dist.group.WORLD):
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        totals.append(int(total))
    sys.stdout.write(json.dumps({"rank": rw.get_rank(), "totals": totals}) + "\n")
