"""Rank 1 leaves late; rank zero says whom it waits for."""

import time

import rankwise as rw
from rankwise._session import lifecycle

lifecycle._PATIENCE_SECONDS = 0.2
with rw.init(timeout=100.0):
    rw.barrier()
    if rw.get_rank() == 1:
        time.sleep(1.0)
