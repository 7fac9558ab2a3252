"""How long the ranks of one host take to join, and the descriptors and threads of each: for `benchmarks/growth.py`.

The fork server of `rankwise.launch` starts the ranks of both libraries, each time anew.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankwise as rw

RESOURCE_RANKS = (2, 4, 16, 64)
JOIN_ROUNDS = 3
# Of many ranks, which take a long time to start.
JOIN_ROUNDS_OF_MANY = 2
NUM_GROUPS = 20
MOMENTS = ("after joining", f"after {NUM_GROUPS} groups of all ranks", "after these are closed")
LAZY = "TORCH_GLOO_LAZY_INIT"
SIDES = ("rankwise", "torch")


def join(side: str) -> None:
    if side == "rankwise":
        rw.init()
    else:
        dist.init_process_group("gloo")


def leave(side: str) -> None:
    if side == "rankwise":
        rw.finalize()
    else:
        dist.destroy_process_group()


def wait_for_all(folder: Path) -> None:
    """Wait until all processes have come, without a connection between them: each makes a file."""
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)


def time_joining(side: str, lazy: str, folder: Path) -> tuple[float, float]:
    torch.set_num_threads(1)
    os.environ[LAZY] = lazy
    wait_for_all(folder)
    start = time.perf_counter()
    join(side)
    joined = time.perf_counter()
    dist.barrier()
    leave(side)
    return start, joined


def measure_joining(ranks: int) -> list[dict[str, Any]]:
    """Return the rows of joining: the time from when all processes are ready until the last one has joined."""
    rows = []
    rounds = JOIN_ROUNDS if ranks <= 16 else JOIN_ROUNDS_OF_MANY
    for lazy, suffix in (("0", ""), ("1", f", `{LAZY}=1`")):
        took: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                with tempfile.TemporaryDirectory() as folder:
                    moments = rw.launch(time_joining, side, lazy, Path(folder), nproc=ranks)
                took[side].append(max(end for _, end in moments) - min(start for start, _ in moments))
        rows.append({
            "table": "joining",
            "ranks": ranks,
            "name": f"`init`{suffix}",
            "against": f"`init_process_group`{suffix}",
            **{side: statistics.median(took[side]) for side in SIDES},
            "ratio": statistics.median(one / two for one, two in zip(*took.values(), strict=True)),
            "rounds": rounds,
        })  # fmt: skip
    return rows


def measure_resources(ranks: int) -> list[dict[str, Any]]:
    """Return the rows of descriptors and threads that a rank has more than before it joined; the most of any rank."""
    most = {}
    for side in SIDES:
        counts = rw.launch(count_resources, side, nproc=ranks)
        most[side] = [
            {kind: max(count[kind] for count in moment) for kind in moment[0]} for moment in zip(*counts, strict=True)
        ]
    return [
        {"table": "resources", "ranks": ranks, "name": name, "rankwise": ours, "torch": torchs}
        for name, ours, torchs in zip(MOMENTS, *most.values(), strict=True)
    ]


def count_resources(side: str) -> list[dict[str, int]]:
    """Collective. Return the descriptors and threads of this rank at each of the moments, less those before it joins.

    Each group is used once, for what a library opens only then.
    """
    torch.set_num_threads(1)
    make: Callable[[], Any] = rankwise_group if side == "rankwise" else torch_group
    close: Callable[[Any], object] = rw.Group.close if side == "rankwise" else dist.destroy_process_group
    before = open_now()
    join(side)
    counts = [open_now()]
    groups = [make() for _ in range(NUM_GROUPS)]
    counts.append(open_now())
    while groups:
        close(groups.pop())
    gc.collect()
    dist.barrier()
    counts.append(open_now())
    dist.barrier()
    leave(side)
    return [{kind: count[kind] - before[kind] for kind in count} for count in counts]


def rankwise_group() -> rw.Group:
    group = rw.new_group(range(rw.get_world_size()))
    rw.all_reduce(1.0, group=group)
    return group


def torch_group() -> Any:  # noqa: ANN401 - torch's ProcessGroup, or an int where this rank is not a member
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1), group=group)
    return group


def open_now() -> dict[str, int]:
    process = Path("/proc/self")
    return {"descriptors": len(list((process / "fd").iterdir())), "threads": len(list((process / "task").iterdir()))}
