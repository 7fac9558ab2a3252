"""Reductions of large tensors on the CPUs of one host beside gloo's: alternating in one run, medians of the rounds.

python benchmarks/large_reductions.py
python benchmarks/large_reductions.py --save FOLDER   # also FOLDER/large_reductions.json, in seconds

The time of a round is that of the slowest rank. One plain copy of the tensor, made by all ranks at once, shows the
bandwidth of the memory in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise as rw

ROUNDS = 9
# The bytes that a round reduces, at most in so many calls.
ROUND_BYTES = 1 << 23
MAX_CALLS = 100
SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 25_000_000)


def seconds(call: Callable[[], object], calls: int) -> float:
    """Collective. Return the seconds of one of several calls, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def kinds(numel: int) -> Mapping[str, Callable[[], object]]:
    """Collective. Return what is compared, on tensors of zeros: their sums stay small."""
    x, y, pieces = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel).chunk(rw.get_world_size())
    part, parts = torch.zeros_like(pieces[0]), [torch.zeros_like(pieces[0]) for _ in pieces]
    return {
        "gloo": lambda: dist.all_reduce(x),
        "all_reduce_": lambda: rw.all_reduce_(x),
        "all_reduce": lambda: rw.all_reduce(x),
        "copy": lambda: y.copy_(x),
        "gloo's reduce_scatter": lambda: dist.reduce_scatter(part, list(pieces)),
        "reduce_scatter": lambda: rw.reduce_scatter(pieces),
        "gloo's all_gather": lambda: dist.all_gather(parts, part),
        "all_gather_cat": lambda: rw.all_gather_cat(part),
    }


def measure() -> list[dict[str, float]]:
    """Collective. Measure, as one rank; return the medians by size."""
    torch.set_num_threads(1)
    rows = []
    with rw.init():
        rw.barrier()  # the ranks are connected after it
        for numel in SIZES:
            calls = max(1, min(MAX_CALLS, ROUND_BYTES // (4 * numel)))
            compared = kinds(numel)
            times: dict[str, list[float]] = {name: [] for name in compared}
            for _ in range(ROUNDS + 1):
                for name, call in compared.items():
                    times[name].append(seconds(call, calls))
            medians = {name: statistics.median(values[1:]) for name, values in times.items()}
            rows.append({"bytes": 4.0 * numel, **medians})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    folder = parser.parse_args().save
    found = {ranks: rw.launch(measure, nproc=ranks)[0] for ranks in (2, 4)}
    ours = ("all_reduce_", "all_reduce", "copy")
    print(f"| ranks | bytes | gloo | {' | '.join(ours)} | copy, GB/s | reduce_scatter | all_gather_cat |")
    print("| --- " * 9 + "|")
    for ranks, rows in found.items():
        for row in rows:
            ratios = [row[name] / row["gloo"] for name in ours]
            ratios += [2 * row["bytes"] / row["copy"] / 1e9]
            ratios += [row["reduce_scatter"] / row["gloo's reduce_scatter"]]
            ratios += [row["all_gather_cat"] / row["gloo's all_gather"]]
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {ranks} | {row['bytes']:,.0f} | {row['gloo'] * 1e3:.2f} ms | {cells} |")
    if folder is not None:
        (folder / "large_reductions.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
