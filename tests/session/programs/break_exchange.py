"""A rank is stopped or killed at a point of an exchange; each prints how this call ended, and the next one.

Arguments: the point, the rank, "stop" or "kill", and a folder. A stopped rank continues when the call of all others has
ended, so if one of them waited for it, none of them would end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise._comm.control.page.meeting import PageMeeting
from rankwise._comm.control.page.pipes import PipeEnd
from rankwise._comm.control.page.window import Window
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.data.staging import Staging

# The class, its method, and whether the rank stops after the first call of it.
POINTS: dict[str, tuple[type, str, bool]] = {
    "before its frame": (Window, "write", False),
    "after its frame": (Window, "write", True),
    "before the verdict": (PageChannel, "_publish", False),
    "after the verdict": (PageChannel, "_publish", True),
    "before reading": (Window, "body", False),
    "after reading": (Window, "body", True),
    "in data": (PipeEnd, "move", True),
    "before a reduction in memory": (Staging, "begin", False),
    "before its result": (PageMeeting, "meet", False),
}
point, who, way, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
owner, name, is_after = POINTS[point]
if name == "body" and who == 0:  # the leader reads the frames of all, the others its verdict
    name = "bodies_of_calls"
original = getattr(owner, name)


def broken(self: Any, *args: Any, **more: Any) -> Any:
    """Stop, or die, before or after the method, once."""
    setattr(owner, name, original)
    result = original(self, *args, **more) if is_after else None
    os.kill(os.getpid(), signal.SIGSTOP if way == "stop" else signal.SIGKILL)
    return result if is_after else original(self, *args, **more)


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"result {call()}"
    except rw.CollectiveError as error:
        return f"{type(error).__name__} {error}".replace("\n", " ")


def first() -> object:
    if point == "in data":
        return rw.all_to_all([torch.ones(1_000_000)] * rw.get_world_size())
    if owner in {Staging, PageMeeting}:
        return rw.all_reduce(torch.ones(1_000_000))[0].item()
    return rw.barrier(timeout=1.0)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


torch.set_num_threads(1)
with rw.init(timeout=10 if point == "in data" else 150):
    rank, size = rw.get_rank(), rw.get_world_size()
    processes = rw.all_gather(os.getpid())
    rw.all_reduce(torch.ones(1_000_000))  # connects the ranks
    if rank == who:
        setattr(owner, name, broken)
    print(outcome(first), flush=True)
    if rank != who and way == "stop":
        (folder / str(rank)).touch()
        if rank == min({0, 1} - {who}):
            # An exchange that needs nothing of the rank any more may end before the rank stops, and a signal that comes
            # before the stop has no effect.
            while len(list(folder.iterdir())) < size - 1 or not is_stopped(processes[who]):
                time.sleep(0.01)
            os.kill(processes[who], signal.SIGCONT)
    print(outcome(lambda: rw.all_reduce(1)), flush=True)
