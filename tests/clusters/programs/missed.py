"""Two ranks on two hosts: one that no host has, one that does not come, and one that ends on the spot."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rankwise as rw

rank, told = int(os.environ["HOST"]), Path(sys.argv[1])

try:
    rw.init(rank=rank, world_size=3, address="left:29501", timeout=3)
except rw.JoinTimeoutError as error:
    if rank == 0:
        print(error)

with rw.init(rank=rank, world_size=2, address="left:29502", timeout=100):
    rw.all_reduce(1)
    if rank == 1:
        while not told.exists():
            time.sleep(0.02)
        os._exit(0)
    try:
        rw.barrier("epoch end", timeout=0.5)
    except rw.CollectiveTimeoutError as error:
        print(error)
    told.touch()
    try:
        rw.broadcast("too late")
    except rw.CollectiveError as error:
        print(error)
