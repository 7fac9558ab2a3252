"""Rank 0 ends, without a `with` block, in the way that the argument says, while rank 1 waits for it."""

import os
import sys

import rankwise as rw

how = sys.argv[1]
rw.init(timeout=280.0)
try:
    if how == "gone":
        rw.barrier()
        if rw.get_rank() == 1:
            os._exit(0)
    elif rw.get_rank() == 0:
        if how == "exit":
            sys.exit(3)
        raise ValueError("no data")
    else:
        rw.barrier()
finally:
    if how != "exit":
        rw.finalize()
