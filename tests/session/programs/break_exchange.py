"""Collectives in ranks that are stopped, killed or interrupted at a step of an exchange; each prints how it ended.

Arguments: the step, the rank, and the way ("stop", "kill"). A stopped rank is continued by another process.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import rankwise as rw
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.window import Window

step, who, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
owners: dict[str, Any] = {
    "_enter": PageChannel,
    "_finish": PageChannel,
    "_publish": PageChannel,
    "_verdict": PageChannel,
    "_accepted": PageChannel,
    "_wake_others": PageChannel,
    "write": Window,
    "fence": Window,
}


def outcome(value: int) -> str:
    try:
        return str(rw.all_reduce(value))
    except rw.CollectiveError as error:
        return f"{type(error).__name__} {error}".replace("\n", " ")


with rw.init(timeout=float(sys.argv[4])):
    rank = rw.get_rank()
    rw.barrier()
    original = getattr(owners[step], step)
    places = iter(range(100))

    def broken(self: Any, *args: Any, **more: Any) -> Any:
        place = next(places)
        if place == 0 and "before" in sys.argv[5]:
            os.kill(os.getpid(), signal.SIGSTOP if way == "stop" else signal.SIGKILL)
        result = original(self, *args, **more)
        if place == 0 and "after" in sys.argv[5]:
            os.kill(os.getpid(), signal.SIGSTOP if way == "stop" else signal.SIGKILL)
        return result

    if rank == who:
        setattr(owners[step], step, broken)
    print("first", outcome(1), flush=True)
    setattr(owners[step], step, original)
    print("second", outcome(2), flush=True)
    print("third", outcome(3), flush=True)
