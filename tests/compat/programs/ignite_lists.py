"""Three ranks that pass lists of ranks: one gives up waiting for another, which comes later, and dies in the end."""

import os
import sys
import time
from pathlib import Path

import rankwise as rw
import rankwise.compat.ignite as idist

gave_up = Path(sys.argv[1])
idist.initialize("gloo", timeout=2)
rank = idist.get_rank()
if rank == 0:
    try:
        idist.all_reduce(1, group=[0, 1])
    except rw.CollectiveTimeoutError as error:
        print(error)
    gave_up.touch()
while not gave_up.exists():
    time.sleep(0.01)
print(idist.all_reduce(1, group=[0, 1]), flush=True)
if rank == 1:
    os._exit(3)
if rank == 2:
    try:
        idist.all_reduce(1, group=[1, 2])
    except rw.CollectiveError as error:
        print(error)
idist.finalize()
