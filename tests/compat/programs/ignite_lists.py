"""Three ranks that pass lists of ranks: two give up waiting for each other, then meet; one of them dies in the end."""

import os
import sys
import time
from pathlib import Path

import rankwise as rw
import rankwise.compat.ignite as idist

folder = Path(sys.argv[1])
idist.initialize("gloo", timeout=2)
rank = idist.get_rank()
for first in (0, 1):
    if rank == first:
        try:
            idist.all_reduce(1, group=[0, 1])
        except rw.CollectiveTimeoutError as error:
            print(error)
        (folder / f"{rank} gave up").touch()
    while not (folder / f"{first} gave up").exists():
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
