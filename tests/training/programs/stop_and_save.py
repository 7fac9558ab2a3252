"""A loop that ends at a signal, and saves; with the argument "for-ever" it does not end then."""

import os
import sys
import time
from pathlib import Path

import rankwise as rw


def show(text: str) -> None:
    """Write a line at once: under torchrun, which starts `python -u`, print writes a text and its newline apart."""
    os.write(1, f"{text}\n".encode())


stop = rw.Stop()  # not closed: the signal of scancel may come late to the other node
with rw.init():
    Path(f"pid{rw.get_rank()}").write_text(str(os.getpid()))
    step = 0
    while not stop.agreed():
        step += 1
        time.sleep(0.001)
        if step == 20 and rw.is_rank_zero():
            show("running")
    show(f"rank {rw.get_rank()} stopped at {step}: {stop.reason}")
    if "for-ever" in sys.argv:
        while True:
            time.sleep(0.01)
    rw.barrier("saved")
    show(f"rank {rw.get_rank()} saved")
