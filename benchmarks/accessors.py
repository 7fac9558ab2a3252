"""`get_rank()` beside torch's own: alternating in one run, median of the rounds.

python benchmarks/accessors.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import torch.distributed as dist

import rankwise as rw

ROUNDS = 15
CALLS = 100_000


def nanoseconds(call: Callable[[], int]) -> float:
    return timeit.timeit(call, number=CALLS) / CALLS * 1e9


def compare(name: str, goal: float) -> None:
    """Print the median cost of both, and of their ratio round by round."""
    ours, torchs = [], []
    for _ in range(ROUNDS):
        torchs.append(nanoseconds(dist.get_rank))
        ours.append(nanoseconds(rw.get_rank))
    ratio = statistics.median(a / b for a, b in zip(ours, torchs, strict=True))
    print(
        f"| `get_rank()`, {name} | {statistics.median(ours):.0f} ns | {statistics.median(torchs):.0f} ns "
        f"| {ratio:.2f} | {goal} |"
    )


def main() -> None:
    print("| getter | rankwise | torch | ratio | goal |\n| --- | --- | --- | --- | --- |")
    with rw.init():
        compare("with a session", 0.35)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compare("with a foreign group", 0.6)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
