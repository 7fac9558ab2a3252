"""Rank 0 receives from rank 1, which never sends, in the way that the argument names; rank 0 prints its error."""

import os
import signal
import sys
import time

import rankwise as rw

how = sys.argv[1]
try:
    with rw.init(timeout=3.0):
        if rw.get_rank() == 0:
            rw.recv(src=1)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise RuntimeError("no data")
        else:
            time.sleep(6.0)
except rw.RankwiseError as error:
    print(type(error).__name__, error)
