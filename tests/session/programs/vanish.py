"""The rank that is named vanishes in a given way at a given point; the others print the error that this is to them."""

import os
import signal
import sys
import threading
import time

import torch

import rankwise as rw

how, where, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)


def vanish() -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(5)
    if how == "raises":
        raise ValueError("no data")
    sys.exit(0)


def later(seconds: float) -> None:
    """Vanish in the middle of something."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


mine = False
try:
    with rw.init(timeout=280):
        mine = rw.get_rank() == who
        if where == "at once":
            if mine:
                vanish()
            rw.all_reduce(1)
        elif where == "later":
            rw.barrier()
            if mine:
                vanish()
            rw.all_gather(torch.ones(rw.get_rank() + 1))
        elif where == "in data":
            rw.barrier()
            data = torch.ones(20_000_000)
            if mine:
                later(0.1)
            while True:
                rw.all_reduce(data, op="mean")
        elif where == "in ragged data":
            data = torch.ones(1_000_000 * (1 + rw.get_rank()))
            rw.barrier()
            if mine:
                later(0.1)
            while True:
                rw.all_gather(data)
        elif where == "in all_to_all":
            pieces = [torch.ones(1_000_000 + other) for other in range(rw.get_world_size())]
            rw.barrier()
            if mine:
                later(0.1)
            while True:
                rw.all_to_all(pieces)
        elif where == "in a group":
            group = rw.new_group([0, 1])
            if mine:
                vanish()
            rw.all_reduce(1, group=group if rw.get_rank() < 2 else None)
        elif where in {"in its turn", "in rank zero's turn"}:

            @rw.one_rank_only(who)
            def work() -> None:
                time.sleep(1.0)  # so that the others look at longer intervals
                vanish()

            work()
        elif where == "while others wait":
            # Nothing is expected of this rank yet: the one whose turn it is works on.
            with rw.rank_zero_first():
                if rw.get_rank() == 0:
                    time.sleep(1.0)
                elif mine:
                    vanish()
            rw.barrier()
except rw.RankwiseError as error:
    if mine and where not in {"in data", "in ragged data", "in all_to_all"}:
        raise
    print(type(error).__name__, error)
