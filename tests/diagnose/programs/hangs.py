"""A job in which one rank does not come to a collective: the rank, how it hangs, whose collective, seconds."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankwise

VICTIM, HOW, COLLECTIVE, SECONDS = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])


def hang() -> None:
    """Do not return."""
    if HOW == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "skips":
        dist.new_group()
    if HOW == "lock":
        while True:
            ctypes.PyDLL(None).sleep(600)
    time.sleep(600)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    if COLLECTIVE == "adopted":
        dist.init_process_group("gloo")
    with rankwise.init(device="cpu", hang_report=SECONDS) as session:
        model = DistributedDataParallel(torch.nn.Linear(4, 1)) if COLLECTIVE == "ddp" else torch.nn.Linear(4, 1)
        for step in range(3):
            if step == 2 and session.rank == VICTIM:
                hang()
            if COLLECTIVE == "ddp":
                model(torch.ones(4)).sum().backward()
            elif COLLECTIVE in {"torch", "adopted"}:
                dist.all_reduce(torch.ones(4))
            else:
                rankwise.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
