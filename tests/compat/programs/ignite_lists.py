"""Three ranks that pass lists of ranks: two give up waiting for each other, then meet; one dies waiting in the end."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise._session.current import current_session

folder = Path(sys.argv[1])
idist.initialize("gloo", timeout=60)
rank = idist.get_rank()
store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
store.set_timeout(timedelta(seconds=0.5))
for first in (0, 1):
    if rank == first:
        try:
            idist.all_reduce(1, group=[0, 1])
        except rw.CollectiveTimeoutError as error:
            print(error)
        (folder / f"{rank} gave up").touch()
    while not (folder / f"{first} gave up").exists():
        time.sleep(0.01)
store.set_timeout(timedelta(seconds=60))
print(idist.all_reduce(1, group=[0, 1]), flush=True)
if rank == 1:
    time.sleep = lambda _: os._exit(3)  # dies as it waits for rank 2, which comes later
    idist.all_reduce(1, group=[1, 2])
if rank == 2:
    while not current_session().comm.control.dead_ranks([1]):
        time.sleep(0.01)
    try:
        idist.all_reduce(1, group=[1, 2])
    except rw.CollectiveError as error:
        print(error)
idist.finalize()
