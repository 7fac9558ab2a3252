"""Rank 1 dies in a given way while the others are in a collective."""

import os
import signal
import sys

import torch

import rankwise as rw

try:
    with rw.init(timeout=float(sys.argv[2])):
        rw.barrier()
        if rw.get_rank() == 1:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "raise":
                raise SystemExit(3)
            if sys.argv[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        rw.all_reduce(torch.ones(3))
except rw.RankwiseError as error:
    sys.exit(f"{type(error).__name__}: {error}")
