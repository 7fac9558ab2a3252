"""Calls with small values, new groups, and joining, with 2 to 64 ranks beside torch's own: alternating in one run.

python -m benchmarks.growth
python -m benchmarks.growth --ranks 2 4 --only calls
python -m benchmarks.growth --save docs   # also docs/growth.json and docs/growth.svg
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankwise as rw
from benchmarks.joining import RESOURCE_RANKS, measure_joining, measure_resources
from benchmarks.plot import log_log_plot

RANKS = (2, 4, 8, 16, 32, 64)
# So many calls follow each other without a pause, and are timed together.
CALLS = 50
WARM_UP = 2
MIN_ROUNDS, MAX_ROUNDS = 5, 60
# Of both sides of a row together; the number of rounds is chosen accordingly.
SECONDS = 8.0
GOALS = {2: 0.4}
OTHER_GOAL = 0.25
GROUP_GOAL = 0.5

Call = Callable[[], object]
# The moments when a rank began and ended a block of calls, on the clock that all processes of the host share.
Block = tuple[float, float]
Row = dict[str, Any]


def small_calls() -> dict[str, tuple[str, Call, Call]]:
    """Return the calls of rankwise and of torch, by the text of the row."""
    number = torch.zeros(1)
    metrics = {"loss": 0.5, "accuracy": 0.25, "seconds": 1.5}

    def reduce_stacked() -> dict[str, float]:
        stacked = torch.tensor(list(metrics.values()))
        dist.all_reduce(stacked)
        return dict(zip(metrics, stacked.tolist(), strict=True))

    def gather_object() -> list[object]:
        gathered: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, metrics)
        return gathered

    return {
        "`all_reduce` of a number": (
            "`all_reduce` of a tensor",
            lambda: rw.all_reduce(1.0),
            lambda: dist.all_reduce(number),
        ),
        "`all_reduce` of a dict": ("`all_reduce`, stacked", lambda: rw.all_reduce(metrics), reduce_stacked),
        "`barrier`": ("`barrier`", rw.barrier, dist.barrier),
        "`broadcast` of a dict": (
            "`broadcast_object_list`",
            lambda: rw.broadcast(metrics),
            lambda: dist.broadcast_object_list([metrics], src=0),
        ),
        "`all_gather` of a dict": ("`all_gather_object`", lambda: rw.all_gather(metrics), gather_object),
    }


def timed(call: Call, calls: int) -> Block:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return start, time.perf_counter()


def alternate(ours: Call, torchs: Call, calls: int, after_each: Call = lambda: None) -> list[tuple[Block, Block]]:
    """Collective. Time blocks of both, in turn; each goes first every other time."""
    pairs: list[tuple[Block, Block]] = []
    rounds = WARM_UP + MIN_ROUNDS
    while len(pairs) < rounds:
        first, second = (ours, torchs) if len(pairs) % 2 else (torchs, ours)
        one = timed(first, calls)
        after_each()
        two = timed(second, calls)
        after_each()
        pairs.append((one, two) if len(pairs) % 2 else (two, one))
        if len(pairs) == WARM_UP:  # the first rounds also start threads and connections, so the last of them counts
            took = two[1] - one[0]
            rounds = WARM_UP + rw.broadcast(min(max(MIN_ROUNDS, int(SECONDS / took)), MAX_ROUNDS))
    return pairs[WARM_UP:]


def measure_calls() -> dict[str, list[tuple[Block, Block]]]:
    """Collective. Time all small calls, as one rank."""
    torch.set_num_threads(1)
    with rw.init():
        return {name: alternate(ours, torchs, CALLS) for name, (_, ours, torchs) in small_calls().items()}


def measure_new_group() -> dict[str, list[tuple[Block, Block]]]:
    """Collective. Time how groups of four ranks are made, which are closed outside of the timed blocks."""
    torch.set_num_threads(1)
    with rw.init():
        members = list(range(4))
        made: list[rw.Group] = []
        made_by_torch: list[dist.ProcessGroup] = []

        def close() -> None:
            dist.barrier()  # torch's groups must be complete on all ranks before one rank destroys its part
            while made:
                made.pop().close()
            while made_by_torch:
                if rw.get_rank() in members:
                    dist.destroy_process_group(made_by_torch[-1])
                made_by_torch.pop()

        pairs = alternate(
            lambda: made.append(rw.new_group(members)),
            lambda: made_by_torch.append(dist.new_group(members)),
            calls=3,
            after_each=close,
        )
        return {"`new_group` of 4": pairs}


def rows_of(table: str, ranks: int, calls: int, results: Sequence[dict[str, list[tuple[Block, Block]]]]) -> list[Row]:
    """Combine the blocks of all ranks: a block lasts from its begin on the first rank to its end on the last one."""
    against = {name: text for name, (text, _, _) in small_calls().items()}
    rows = []
    for name in results[0]:
        seconds = []
        for blocks in zip(*(result[name] for result in results), strict=True):
            sides = zip(*blocks, strict=True)  # rankwise's blocks of all ranks, then torch's
            seconds.append([(max(end for _, end in side) - min(start for start, _ in side)) / calls for side in sides])
        ours, torchs = zip(*seconds, strict=True)
        rows.append({
            "table": table,
            "ranks": ranks,
            "name": name,
            "against": against.get(name, "`new_group`"),
            "rankwise": statistics.median(ours),
            "torch": statistics.median(torchs),
            "ratio": statistics.median(one / two for one, two in seconds),
            "rounds": len(seconds),
        })  # fmt: skip
    return rows


def shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.5 else f"{seconds * 1e6:,.0f} us"


def print_ratios(rows: Sequence[Row]) -> None:
    print("| ranks | rankwise | torch | rankwise | torch | ratio | goal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        goal = {"calls": GOALS.get(row["ranks"], OTHER_GOAL), "groups": GROUP_GOAL}.get(row["table"], "")
        print(
            f"| {row['ranks']} | {row['name']} | {row['against']} | {shown(row['rankwise'])} "
            f"| {shown(row['torch'])} | {row['ratio']:.2f} | {goal} |"
        )


def print_resources(rows: Sequence[Row]) -> None:
    print("| ranks | moment | descriptors, rankwise | torch | threads, rankwise | torch |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ours, torchs = row["rankwise"], row["torch"]
        print(
            f"| {row['ranks']} | {row['name']} | {ours['descriptors']} | {torchs['descriptors']} "
            f"| {ours['threads']} | {torchs['threads']} |"
        )


def measure(table: str, ranks: int) -> list[Row]:
    """Measure the rows of a table with so many ranks."""
    if table == "calls":
        return rows_of(table, ranks, CALLS, rw.launch(measure_calls, nproc=ranks))
    if table == "groups":
        return rows_of(table, ranks, 3, rw.launch(measure_new_group, nproc=ranks)) if ranks >= 4 else []
    if table == "joining":
        return measure_joining(ranks)
    return measure_resources(ranks) if ranks in RESOURCE_RANKS else []


def save(rows: Sequence[Row], folder: Path) -> None:
    (folder / "growth.json").write_text(json.dumps(rows, indent=1) + "\n")
    calls = [row for row in rows if row["table"] == "calls"]
    if calls:
        (folder / "growth.svg").write_text(log_log_plot(calls))


def main() -> None:
    tables = ("calls", "groups", "joining", "resources")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write growth.json and growth.svg there")
    arguments = parser.parse_args()
    print(f"load average at the start: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}")
    rows: list[Row] = []
    for table in arguments.only:
        measured = [row for ranks in arguments.ranks for row in measure(table, ranks)]
        print()
        (print_resources if table == "resources" else print_ratios)(measured)
        rows += measured
        if arguments.save is not None:
            save(rows, arguments.save)
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
