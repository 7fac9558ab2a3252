"""A rank of `benchmarks/hosts.py`: on_hosts.py MODE FOLDER SECONDS, with torch alone, or small collectives of both.

It writes times into files of the folder: "first-RANK" of its first all_reduce, and "fault" of a failure.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CALLS = 30
BLOCKS = 10


def note(folder: Path, name: str) -> None:
    (folder / name).write_text(str(time.time()))


def reduce_for_ever(folder: Path, *, fails: bool) -> None:
    """Reduce; if it fails, the last rank raises an error after some steps."""
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1))
        note(folder, f"last-{dist.get_rank()}")
        if step == 0:
            note(folder, f"first-{dist.get_rank()}")
        if fails and step == 20 and dist.get_rank() == dist.get_world_size() - 1:
            note(folder, "fault")
            raise ValueError("as the benchmark wants")
        time.sleep(0.05)


def collectives(folder: Path) -> None:
    """Measure small collectives of rankwise and of gloo in alternating blocks; rank zero prints the medians."""
    import rankwise as rw  # noqa: PLC0415 - the ranks of torchrun do without it

    small = {"loss": 0.5, "step": 3}
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "`all_reduce` of a number": (lambda: rw.all_reduce(1.5), lambda: dist.all_reduce(torch.tensor(1.5))),
        "`barrier`": (rw.barrier, dist.barrier),
        "`all_gather` of a dict": (
            lambda: rw.all_gather(small),
            lambda: dist.all_gather_object([None] * dist.get_world_size(), small),
        ),
    }
    lines = []
    with rw.init(timeout=100):
        for name, pair in pairs.items():
            times: tuple[list[float], list[float]] = ([], [])
            for block in range(BLOCKS + 1):
                for call, found in zip(pair, times, strict=True):
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    if block:
                        found.append((time.perf_counter() - start) / CALLS)
            own, gloo = map(statistics.median, times)
            lines.append(f"{name}\t{own}\t{gloo}")
        if rw.get_rank() == 0:
            (folder / "collectives").write_text("\n".join(lines))


def join_late(folder: Path) -> None:
    """Join; the last rank comes when strangers have found the others, and notes how long that has taken."""
    import torch.distributed.nn.functional  # noqa: F401, PLC0415 - a second of imports, which joining does else

    import rankwise as rw  # noqa: PLC0415

    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_last:
        time.sleep(3)
    start = time.perf_counter()
    with rw.init(timeout=100):
        rw.barrier()
        if is_last:
            (folder / "join").write_text(str(time.perf_counter() - start))
        rw.barrier()


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if mode == "collectives":
        collectives(folder)
        return
    if mode == "join":
        join_late(folder)
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[3])))
    reduce_for_ever(folder, fails=mode == "fail")


main()
