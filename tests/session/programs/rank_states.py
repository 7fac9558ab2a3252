"""Three ranks: one waits in another group, in a thread, and one does not come. Rank zero prints its error."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.page import handshake

if sys.argv[1] == "sockets":
    vars(handshake)["MAX_RANKS"] = 0


def main() -> None:
    rw.init(timeout=280)
    pair = rw.new_group([0, 1])
    link: Any = comm_of(pair if rw.get_rank() < 2 else None).control
    links: Links = link._registry.connect()
    rw.barrier()
    if rw.get_rank() == 2:
        rw.store().get("may end")
        return
    if rw.get_rank() == 1:
        thread = threading.Thread(target=rw.all_reduce, args=[1], kwargs={"group": pair})
        thread.start()
        thread.join()
        return

    while not any("all_reduce" in call.text for call in links.ongoing_calls(1)):
        time.sleep(0.01)
    try:
        rw.barrier("epoch", timeout=0.2)
    except rw.CollectiveTimeoutError as error:
        print(error)
    rw.store().set("may end", b"")
    print(rw.all_reduce(1, group=pair))


main()
sys.stdout.flush()
os._exit(0)
