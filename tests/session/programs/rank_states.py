"""Three ranks: one waits in another group, in a thread, and one is killed. Rank zero prints what it knows of them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.page import handshake
from rankwise._comm.control.rank_state import RankState
from rankwise._comm.control.registry import GroupRegistry

if sys.argv[1] == "sockets":
    vars(handshake)["MAX_RANKS"] = 0


def main() -> None:
    rw.init(timeout=280)
    pair = rw.new_group([0, 1])
    link: Any = comm_of(pair if rw.get_rank() < 2 else None).control
    registry: GroupRegistry = link._registry
    rw.barrier()
    if rw.get_rank() == 2:
        rw.store().get("may end")
        os.kill(os.getpid(), signal.SIGKILL)
    if rw.get_rank() == 1:
        thread = threading.Thread(target=rw.all_reduce, args=[1], kwargs={"group": pair})
        thread.start()
        thread.join()
        return

    def states(awaited: Callable[[Sequence[RankState]], object]) -> Sequence[RankState]:
        while not awaited(registry.rank_states()):
            time.sleep(0.01)
        return registry.rank_states()

    states(lambda found: any("all_reduce" in call.text for call in found[1].calls))  # not the barrier's any more
    try:
        rw.barrier("epoch", timeout=0.2)
    except rw.CollectiveTimeoutError as error:
        print(error)
    rw.store().set("may end", b"")
    for state in states(lambda found: found[2].lost_reason):
        calls = [(call.text, call.group, list(call.ranks), call.sequence) for call in state.calls]
        print(state.rank, state.lost_reason or "alive", calls)
    print(rw.all_reduce(1, group=pair))


main()
sys.stdout.flush()
os._exit(0)
