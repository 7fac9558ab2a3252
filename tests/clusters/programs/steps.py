"""Reductions until a file exists: steps.py TIMEOUT FOLDER. A rank that has reduced once makes a file in the folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import rankwise as rw

folder = Path(sys.argv[2])
torch.set_num_threads(1)
with rw.init(timeout=float(sys.argv[1])):
    world, attempt = rw.get_world_size(), rw.restart_count()
    while rw.all_reduce(torch.tensor(float((folder / "enough").exists()))).item() == 0:
        (folder / f"{world}-{attempt}-{rw.get_rank()}").touch()
        time.sleep(0.05)
