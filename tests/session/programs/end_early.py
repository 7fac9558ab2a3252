"""Make a group and end at once; rank 2 takes its time between connecting to rank 0, which ends, and to rank 1."""

import os
import time
from typing import Any

import rankwise as rw
from rankwise._comm.control.links import connect, rank_connections

rw.init(timeout=100.0)
rank = rw.get_rank()
connect_to = rank_connections.connect_to


def connect_slowly(group: Any, group_rank: int, *args: Any, **more: Any) -> Any:
    if group_rank == 1:
        time.sleep(1.0)
    return connect_to(group, group_rank, *args, **more)


vars(connect)["connect_to"] = connect_slowly  # a second that a busy machine may take as well
# Gloo's own connections are made one after the other too: they are not what is looked at here.
rw.new_group([0, 1, 2])
print("made by", rank, flush=True)
os._exit(0)
