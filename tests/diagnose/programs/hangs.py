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


class Spins(dist.ProcessGroup):
    """A backend that torch keeps no record of, and that polls for ever."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: object) -> None:  # noqa: ARG002 - torch's
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stubs have one of several signatures
        self._store = store

    def get_group_store(self) -> dist.Store:
        """Return the store."""
        return self._store

    def allreduce(self, *_: object) -> None:  # type: ignore[override]  # of several signatures
        """Wait for others, who do not come."""
        while True: pass  # fmt: skip  # noqa: E701 - of two lines, ranks would be at one or the other


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    if COLLECTIVE == "adopted":
        dist.init_process_group("gloo")
    if COLLECTIVE == "spins":
        dist.Backend.register_backend("spins", Spins, devices=["cpu"])
        dist.init_process_group("spins")
    with rankwise.init(device="cpu", hang_report=SECONDS) as session:
        model = DistributedDataParallel(torch.nn.Linear(4, 1)) if COLLECTIVE == "ddp" else torch.nn.Linear(4, 1)
        for step in range(3):
            if step == 2 and session.rank == VICTIM:
                hang()
            if COLLECTIVE == "ddp":
                model(torch.ones(4)).sum().backward()
            elif COLLECTIVE == "polls":
                work = dist.all_reduce(torch.ones(4), async_op=True)
                while not work.is_completed():
                    pass
            elif COLLECTIVE in {"torch", "adopted"} or (COLLECTIVE == "spins" and step == 2):
                dist.all_reduce(torch.ones(4))
            else:
                rankwise.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main()
