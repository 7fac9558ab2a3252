"""Rank 0 fails when a file exists; the others say their process id, and wait."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rankwise

if rankwise.get_rank() == 0:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    raise ValueError("this rank fails")
print(os.getpid(), flush=True)
time.sleep(300)
