"""What `rankwise bench` measures, beside `torch.utils.benchmark` for the same calls: alternating in one run.

python -m benchmarks.bench_command [--ranks 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

import rankwise as rw
from rankwise._bench.measuring import Call, time_calls

SECONDS = 0.3


def by_bench(call: Call) -> float:
    """Return the seconds of a call as `rankwise bench` measures them."""
    blocks, _ = time_calls({"call": call}, seconds=SECONDS, device=torch.device("cpu"))["call"]
    return statistics.median(blocks)


def by_timer(call: Call) -> float:
    """Return the seconds of a call as `torch.utils.benchmark` measures them, on the slowest rank."""
    timer = Timer("call()", globals={"call": call})
    trial = rw.all_reduce(timer.timeit(5).mean, "max")
    number = max(1, int(0.005 / trial))
    means = []
    for _ in range(max(5, int(SECONDS / (number * trial)))):
        rw.barrier()
        means.append(timer.timeit(number).mean)
    return statistics.median(rw.all_reduce(means, "max"))


def measure(rounds: int) -> list[tuple[str, float, float, float]]:
    """Collective. Return the medians of both in microseconds, and that of their ratios, for each call."""
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
        rows = []
        for name, call in calls.items():
            pairs = []
            for number in range(rounds):
                first, second = (by_bench, by_timer) if number % 2 else (by_timer, by_bench)
                one, two = first(call), second(call)
                pairs.append((one, two) if number % 2 else (two, one))
            ours, torchs = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
            rows.append((name, ours, torchs, statistics.median(own / timer for own, timer in pairs)))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.0f}\n\n| call | rankwise bench, us | Timer, us | ratio |\n| --- | --- | --- | --- |"
    )
    for name, ours, torchs, ratio in rw.launch(measure, options.rounds, nproc=options.ranks)[0]:
        print(f"| {name} | {ours:.1f} | {torchs:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
