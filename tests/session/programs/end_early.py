"""Make a group and end at once; rank 2 takes its time after it has connected to the others, which end."""

import os
import time
from typing import Any

import rankwise as rw
from rankwise._comm.control.links import connect

rw.init(timeout=100.0)
rank = rw.get_rank()
share_page = vars(connect)["share_page"]


def share_slowly(*args: Any, **more: Any) -> Any:
    page = share_page(*args, **more)
    if rank == 2:
        time.sleep(1.0)
    return page


vars(connect)["share_page"] = share_slowly  # a second that a busy machine may take as well
# Gloo's own connections are made one after the other too: they are not what is looked at here.
rw.new_group([0, 1, 2])
print("made by", rank, flush=True)
os._exit(0)
