"""Rank 1 ends in the way that the argument says; the others wait for it in a collective."""

import os
import signal
import sys

import rankwise as rw

with rw.init(timeout=100.0):
    if rw.get_rank() == 1:
        if sys.argv[1] == "raise":
            raise ValueError("the loss is not a number")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(sys.argv[1]))
    rw.barrier()
