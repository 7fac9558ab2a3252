"""Join and just end, as scripts do that never close anything; rank zero first."""

import time

import rankwise as rw

rw.init(timeout=100.0)
rw.barrier()
if not rw.is_rank_zero():
    time.sleep(0.5)
print("done", rw.get_rank())
