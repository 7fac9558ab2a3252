"""Rank 1 stops in the middle of a reduction in shared memory, and another one continues or kills it while they wait.

Arguments: "continue" or "kill". Each rank prints how this call ended, and the next one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise._comm.control.page.meeting import PageMeeting

STOPPED = 1
original = PageMeeting.meet


def stop_and_meet(self: PageMeeting, *args: Any) -> None:
    """Stop at the first meeting, before the others can go on."""
    if PageMeeting.meet is not original:  # a block of meetings keeps the method that it has found
        PageMeeting.meet = original  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
    original(self, *args)


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"result {call()}"
    except rw.CollectiveError as error:
        return f"{type(error).__name__} {error}".replace("\n", " ")


def resume(pid: int) -> None:
    """Wait until a process has stopped, and send it the signal."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT if sys.argv[1] == "continue" else signal.SIGKILL)


torch.set_num_threads(1)
with rw.init(timeout=150):
    processes = rw.all_gather(os.getpid())
    tensor = rw.all_reduce_(torch.ones(5_000_000))  # connects the ranks
    if rw.get_rank() == STOPPED:
        PageMeeting.meet = stop_and_meet  # type: ignore[assignment, method-assign]
    elif rw.get_rank() == 0:
        threading.Thread(target=resume, args=(processes[STOPPED],)).start()
    print(outcome(lambda: rw.all_reduce_(tensor).unique().tolist()), flush=True)
    print(outcome(lambda: rw.all_reduce(1)), flush=True)
