"""Collectives beside torch's own, mismatch check included: alternating in one run, median of the rounds.

python benchmarks/collectives.py
python benchmarks/collectives.py --save FOLDER   # also FOLDER/collectives.json, in seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import rankwise as rw

ROUNDS = 200
WARM_UP = 10

Row = tuple[str, str, float, float, float]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(
    name: str, against: str, ours: Callable[[], object], torchs: Callable[[], object], rounds: int = ROUNDS
) -> Row:
    """Return the medians of both in microseconds, and of their ratio round by round."""
    pairs = []
    for index in range(WARM_UP + rounds):
        # Each goes first every other time.
        first, second = (ours, torchs) if index % 2 else (torchs, ours)
        one, two = seconds(first), seconds(second)
        pairs.append((one, two) if index % 2 else (two, one))
    pairs = pairs[WARM_UP:]
    medians = [statistics.median(side) * 1e6 for side in zip(*pairs, strict=True)]
    return name, against, medians[0], medians[1], statistics.median(a / b for a, b in pairs)


def pad_to_largest(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors of different length as the usual `dist_utils.py` does."""
    size = torch.tensor([tensor.numel()])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [part[: int(other)] for part, other in zip(gathered, sizes, strict=True)]


def in_objects(value: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def measure() -> list[Row]:
    """Collective. Measure, as one rank."""
    torch.set_num_threads(1)
    with rw.init():
        scalars = {f"metric {number}": number / 7 for number in range(50)}
        floats = torch.rand(50)
        small, large = torch.rand(1024), torch.rand(1 << 20)
        target = torch.rand(1 << 20)
        ragged = torch.rand((10 if rw.get_rank() == rw.get_world_size() - 1 else 1) * (1 << 18))
        report = {"rank": rw.get_rank(), "loss": 0.25, "host": rw.hostname()}

        return [
            compare(
                "`all_reduce` of a dict of 50 scalars",
                "`all_reduce` of 50 floats",
                lambda: rw.all_reduce(scalars),
                lambda: dist.all_reduce(floats),
            ),
            compare(
                "`all_reduce` of a 4 KB tensor",
                "`all_reduce`",
                lambda: rw.all_reduce(small),
                lambda: dist.all_reduce(small),
            ),
            compare(
                "`all_reduce_` of a 4 MB tensor",
                "`all_reduce`",
                lambda: rw.all_reduce_(large),
                lambda: dist.all_reduce(target),
            ),
            compare(
                "`all_reduce` of a 4 MB tensor",
                "`all_reduce` of a clone",
                lambda: rw.all_reduce(large),
                lambda: dist.all_reduce(target.clone()),
            ),
            compare(
                "`all_gather` of 1 MB, 10 MB on one rank",
                "pad to the largest",
                lambda: rw.all_gather(ragged),
                lambda: pad_to_largest(ragged),
                rounds=ROUNDS // 5,
            ),
            compare(
                "`all_gather` of a small dict",
                "`all_gather_object`",
                lambda: rw.all_gather(report),
                lambda: in_objects(report),
            ),
            compare("`barrier`", "`barrier`", rw.barrier, dist.barrier),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    folder = parser.parse_args().save
    rows = []
    print("| ranks | rankwise | torch | rankwise, us | torch, us | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for ranks in (2, 4):
        for name, against, ours, torchs, ratio in rw.launch(measure, nproc=ranks)[0]:
            print(f"| {ranks} | {name} | {against} | {ours:.0f} | {torchs:.0f} | {ratio:.2f} |")
            rows.append({"ranks": ranks, "name": name, "rankwise": ours / 1e6, "torch": torchs / 1e6, "ratio": ratio})
    if folder is not None:
        (folder / "collectives.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
