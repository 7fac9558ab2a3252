"""Gathering of any objects beside torch's `all_gather_object`, through gloo: alternating in one run.

python -m benchmarks.objects
python -m benchmarks.objects --ranks 2 --only arrays small
python -m benchmarks.objects --scale 0.1     # values of a tenth of the size; 8 ranks need 16 GB at full size
python -m benchmarks.objects --save FOLDER   # also FOLDER/objects.json, in seconds and bytes

Times and ratios are medians over the rounds; a round of all ranks takes as long as the slowest of them. The kinds
beside rankwise's are the usual ones, written anew: "padded" as mmengine does it (pickles as tensors, padded to the
largest, without its `torch.tensor(bytearray)`, a loop that takes 0.06 s for each MB), "in lists" as accelerate does it
(`all_gather_object`, then one list with the items of all), and "files", which all ranks write and read.

"And read" is until every array and tensor has been summed. Memory is the most that a rank, or all ranks together, take
beyond what they had before the call, until the result has been read; it is measured once, each kind in new ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rankwise as rw
from benchmarks.collectives import in_objects
from benchmarks.dropins import gather_padded
from benchmarks.gradients import options_parser, save
from benchmarks.peak_memory import Usage, peak_of, usage_of

ROUNDS = 5
WARM_UP = 1
MB = 1_000_000
KINDS = ("rankwise", "padded", "in lists", "files")
TIMES = ("call", "call and read")
MEMORIES = ("memory of a rank", "memory of all ranks")

Gather = Callable[[Any], object]
# Seconds of each kind, for `call` and for `call and read`.
Round = dict[str, dict[str, float]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is sent.

    Attributes:
        text: The text of the row.
        make: Returns a rank's value; takes the rank, the number of ranks, and the scale.
        calls: So many calls follow each other in a round, and are timed together.
        is_broadcast: Whether the value of rank zero is broadcast; otherwise those of all ranks are gathered.
        measures: What is measured beside the time of the call.
        goals: The ratios to torch to reach.
    """

    text: str
    make: Callable[[int, int, float], Any]
    calls: int = 1
    is_broadcast: bool = False
    measures: tuple[str, ...] = (TIMES[0], *MEMORIES)
    goals: Mapping[str, float] = field(default_factory=dict)


def arrays_and_tensors(rank: int, _size: int, scale: float) -> list[dict[str, Any]]:
    """Return 64 MB in 20 arrays and tensors."""
    count = int(MB * scale)
    numbers = np.random.default_rng(rank)
    return [
        {
            "scores": numbers.random(count, dtype=np.float32),
            "indices": numbers.integers(0, count, count // 2),
            "boxes": torch.rand(count // 4, 4),
            "features": torch.rand(count).to(torch.bfloat16),
            "labels": torch.randint(0, count, (count // 4,)),
        }
        for _ in range(4)
    ]


def small_arrays(rank: int, _size: int, scale: float) -> list[Any]:
    return list(np.random.default_rng(rank).random((int(50_000 * scale), 400), dtype=np.float32))


def texts(rank: int, _size: int, scale: float) -> list[dict[str, str]]:
    names = ("id", "question", "answer", "prediction", "source")
    return [{name: f"{name} {number} of rank {rank}" for name in names} for number in range(int(20_000 * scale))]


def uneven(rank: int, size: int, scale: float) -> dict[str, Any]:
    """Return 4 MB, and 40 MB on the last rank."""
    count = int((10 if rank == size - 1 else 1) * MB * scale)
    return {"scores": np.ones(count // 2, np.float32), "features": torch.ones(count // 2), "rank": rank}


def small_dict(rank: int, _size: int, _scale: float) -> dict[str, Any]:
    return {"rank": rank, "loss": 0.25, "host": "localhost", "classes": [f"class {number}" for number in range(80)]}


def long_text(_rank: int, _size: int, scale: float) -> str:
    return "x" * int(256 * MB * scale)


CASES = {
    "arrays": Case(
        text="64 MB of arrays and tensors",
        make=arrays_and_tensors,
        measures=(*TIMES, *MEMORIES),
        goals={"call": 0.05, "call and read": 0.07, "memory of a rank": 0.3},
    ),
    "many": Case(text="50,000 arrays of 1.6 KB", make=small_arrays, goals={"call": 0.5}),
    "texts": Case(text="20,000 dicts of strings", make=texts),
    "uneven": Case(text="4 MB, 40 MB on one rank", make=uneven),
    "small": Case(text="1 KB", make=small_dict, calls=100, measures=("call",), goals={"call": 0.8}),
    "broadcast": Case(text="`broadcast` of 256 MB of text", make=long_text, is_broadcast=True),
}


def gather_in_lists(value: object) -> list[object]:
    """Gather as accelerate does: lists as objects, then one list of their items."""
    gathered: list[Any] = in_objects(value if isinstance(value, list) else [value])
    return [item for items in gathered for item in items]


def gather_through_files(folder: Path) -> Gather:
    """Return a function that gathers as programs with a common folder do: all ranks write a file, and read all."""
    numbers = itertools.count()

    def gather(value: object) -> list[object]:
        # Two files of each rank in turn: when it writes the next one, all have read the one before the last.
        ending = next(numbers) % 2
        (folder / f"{dist.get_rank()}.{ending}").write_bytes(pickle.dumps(value))
        dist.barrier()
        return [pickle.loads((folder / f"{rank}.{ending}").read_bytes()) for rank in range(dist.get_world_size())]

    return gather


def broadcast_in_list(value: object) -> object:
    values = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def kinds_of(case: Case, folder: Path) -> dict[str, Gather]:
    """Return what is compared, torch's first."""
    if case.is_broadcast:
        return {"torch": broadcast_in_list, "rankwise": rw.broadcast}
    ours = (rw.all_gather, gather_padded, gather_in_lists, gather_through_files(folder))
    return {"torch": in_objects, **dict(zip(KINDS, ours, strict=True))}


def total(value: object) -> float:
    """Read a value: return the sum of all numbers in its arrays and tensors."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return float(value.sum())
    if isinstance(value, (list, dict)):
        return sum(total(item) for item in (value.values() if isinstance(value, dict) else value))
    return 0.0


def timed(gather: Gather, value: object, calls: int) -> dict[str, float]:
    """Collective. Return the seconds of a call, and those until its result has been read, but not until it is freed."""
    rw.barrier()
    start = time.perf_counter()
    for _ in range(calls - 1):
        gather(value)
    result = gather(value)
    returned = time.perf_counter()
    total(result)
    return {"call": (returned - start) / calls, "call and read": (time.perf_counter() - start) / calls}


def measure(name: str, scale: float, rounds: int, folder: Path) -> list[Round]:
    """Collective. Return the seconds of each kind in each round, in alternating order, of the slowest rank."""
    torch.set_num_threads(1)
    case = CASES[name]
    found: list[Round] = []
    with rw.init():
        value = case.make(rw.get_rank(), rw.get_world_size(), scale)
        kinds = kinds_of(case, folder)
        for number in range(WARM_UP + rounds):
            seconds = {kind: timed(kinds[kind], value, case.calls) for kind in list(kinds)[:: 1 if number % 2 else -1]}
            slowest: Round = rw.all_reduce(seconds, op="max")
            found.append(slowest)
    return found[WARM_UP:]


def measure_memory(name: str, kind: str, scale: float, folder: Path, sampled: Path) -> Usage:
    """Collective. Return the memory of this rank around a call and around reading its result."""
    torch.set_num_threads(1)
    case = CASES[name]
    with rw.init():
        value = case.make(rw.get_rank(), rw.get_world_size(), scale)
        gather = kinds_of(case, folder)[kind]
        # What is loaded and opened once does not belong to the call.
        total(gather(case.make(rw.get_rank(), rw.get_world_size(), 1e-3)))

        def call() -> object:
            result = gather(value)
            total(result)
            return result

        return usage_of(call, sampled)


def row_of(ranks: int, case: Case, name: str, rounds: list[dict[str, float]]) -> Row:
    """Combine the rounds of a measure: medians of all kinds, and of their ratios round by round."""
    row: Row = {"ranks": ranks, "name": case.text, "measure": name, "goal": case.goals.get(name)}
    for kind in rounds[0]:
        row[kind] = statistics.median(each[kind] for each in rounds)
    row["ratios"] = {kind: statistics.median(each[kind] / each["torch"] for each in rounds) for kind in rounds[0]}
    if "files" in row:
        row["to files"] = statistics.median(each["rankwise"] / each["files"] for each in rounds)
    return row


def rows_of(ranks: int, name: str, options: argparse.Namespace) -> list[Row]:
    """Measure a case."""
    case, rows = CASES[name], []
    with tempfile.TemporaryDirectory() as folder:
        rounds = rw.launch(measure, name, options.scale, options.rounds, Path(folder), nproc=ranks)[0]
        for kind_of_time in TIMES:
            if kind_of_time in case.measures:
                seconds = [{kind: times[kind_of_time] for kind, times in each.items()} for each in rounds]
                rows.append(row_of(ranks, case, kind_of_time, seconds))
        if MEMORIES[0] in case.measures:
            peaks = {
                kind: peak_of(measure_memory, name, kind, options.scale, Path(folder), nproc=ranks)
                for kind in kinds_of(case, Path(folder))
            }
            rows.append(row_of(ranks, case, MEMORIES[0], [{kind: peak.of_a_rank for kind, peak in peaks.items()}]))
            rows.append(row_of(ranks, case, MEMORIES[1], [{kind: peak.of_all for kind, peak in peaks.items()}]))
    return rows


def print_row(row: Row) -> None:
    torchs = row["torch"]
    if row["measure"] in MEMORIES:
        shown = f"{torchs / MB:,.0f} MB"
    else:
        shown = f"{torchs:.2f} s" if torchs >= 0.5 else f"{torchs * 1e3:.2f} ms"
    ratios = row["ratios"]
    cells = [f"{ratios[kind]:.2f}" if kind in ratios else "" for kind in KINDS]
    cells.insert(1, "" if row["goal"] is None else f"{row['goal']}")
    cells.append(f"{row['to files']:.2f}" if "to files" in row else "")
    print(f"| {row['ranks']} | {row['name']} | {row['measure']} | {shown} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = options_parser(__doc__, ROUNDS, ranks=(2, 4, 8))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    rows = []
    print(f"load average at the start: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, scale {options.scale}\n")
    print(
        "| ranks | a rank's value | measure | torch | rankwise | goal | padded | in lists | files | rankwise to files |"
    )
    print("| --- " * 10 + "|")
    for ranks in options.ranks:
        for name in options.only:
            for row in rows_of(ranks, name, options):
                print_row(row)
                rows.append(row)
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")
    save(rows, options.save, "objects.json")


if __name__ == "__main__":
    main()
