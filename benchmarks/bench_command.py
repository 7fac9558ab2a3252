"""What `rankwise bench` measures, beside `torch.utils.benchmark` for the same calls: alternating in one run.

python -m benchmarks.bench_command [--ranks 2] [--rounds 100]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

import rankwise as rw
from rankwise._bench.measuring import OURS, Call, timed

BLOCK_SECONDS = 0.02


def compare(call: Call, rounds: int) -> tuple[float, float, float]:
    """Collective. Return the seconds of a call by both, on the slowest rank, and the ratio: equal blocks, in turn."""
    timer, device = Timer("call()", globals={"call": call}), torch.device("cpu")
    trial = rw.all_reduce(timed(OURS, call, 20, device).min().item(), "max")
    number = max(1, int(BLOCK_SECONDS / trial))
    sides: list[Callable[[], float]] = [
        lambda: timed(OURS, call, number, device).mean().item(),
        lambda: timer.timeit(number).mean,
    ]
    means: list[list[float]] = [[], []]
    for index in range(2 * rounds):
        side = (index + index // 2) % 2  # each goes first every other time
        rw.barrier()
        means[side].append(sides[side]())
    ours, torchs = (rw.all_reduce(each, "max") for each in means)
    ratio = statistics.median(one / two for one, two in zip(ours, torchs, strict=True))
    return statistics.median(ours), statistics.median(torchs), ratio


def measure(rounds: int) -> list[tuple[str, float, float, float]]:
    """Collective. Return the seconds of each call by both, and the ratio."""
    torch.set_num_threads(1)
    with rw.init(device="cpu"):
        small, large = torch.zeros(1 << 10), torch.zeros(1 << 20)
        calls: dict[str, Call] = {
            "`all_reduce_` of 4 KB": lambda: rw.all_reduce_(small),
            "`all_reduce_` of 4 MB": lambda: rw.all_reduce_(large),
            "`barrier`": rw.barrier,
            "gloo's `all_reduce` of 4 KB": lambda: dist.all_reduce(small),
            "gloo's `all_reduce` of 4 MB": lambda: dist.all_reduce(large),
        }
        return [(name, *compare(call, rounds)) for name, call in calls.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.0f}\n\n| call | rankwise bench, us | Timer, us | ratio |\n| --- | --- | --- | --- |"
    )
    for name, ours, torchs, ratio in rw.launch(measure, options.rounds, nproc=options.ranks)[0]:
        print(f"| {name} | {ours * 1e6:.1f} | {torchs * 1e6:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
