"""Join several times in one process, in the way that the argument says. The rank prints "ok" if all went well."""

import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

how = sys.argv[1]
rank = int(os.environ["RANK"])
kept = []

if how == "one alone first" and rank == 0:
    with rw.init(rank=0, world_size=1):
        pass
if how == "one comes late":
    if rank == 0:
        time.sleep(2.0)
    else:
        for _ in range(2):
            try:
                rw.init(timeout=0.4)
            except rw.JoinTimeoutError:
                continue
for _ in range(3 if how in {"again", "keeps DDP"} else 1):
    with rw.init(timeout=100.0):
        if how == "keeps DDP":
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            kept.append(model)
        total = rw.all_reduce(1)
sys.stdout.write("ok\n" if total == 2 else f"{total}\n")
