"""Synchronization of gradients where they are: its time beside one flat all_reduce of torch.

python benchmarks/gradients.py
python benchmarks/gradients.py --ranks 2 --rounds 5
python benchmarks/gradients.py --save FOLDER   # also FOLDER/gradients.json, in seconds

All kinds of a row alternate in one run, on gradients that exist already. The time of a kind is the median over the
rounds; a round of all ranks takes as long as the slowest of them. The kinds beside rankwise's are the usual ones,
written anew: "flattened" as mmcv does it (flatten, reduce, copy back), "each tensor", and "in buckets", flattened in
buckets of 25 MB, as mmengine does it. The ratios are to "flat", an all_reduce of one tensor with as many elements.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankwise as rw

ROUNDS = 9
WARM_UP = 3
BUCKET_BYTES = 25 << 20
# Name, number of tensors, elements of each.
SIZES = (
    ("25 M floats in 160 tensors", 160, 156_250),
    ("1,000 tensors of 1,000 floats", 1000, 1000),
    ("50 tensors of 16 floats", 50, 16),
)

Row = dict[str, float | int | str]


def grads_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad.data for parameter in parameters if parameter.grad is not None]


def reduce_flattened(grads: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([grad.contiguous().view(-1) for grad in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def reduce_each(grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        dist.all_reduce(grad.div_(dist.get_world_size()))


def in_buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for grad in grads:
        if bucket and sum(other.nbytes for other in bucket) + grad.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(grad)
    yield bucket


def reduce_in_buckets(grads: Sequence[torch.Tensor]) -> None:
    for bucket in in_buckets(grads):
        reduce_flattened(bucket)


def rounds_of(kinds: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Collective. Return the seconds of each kind in each round, in alternating order, of the slowest rank."""
    found: list[dict[str, float]] = []
    for number in range(WARM_UP + rounds):
        names = list(kinds)[:: 1 if number % 2 else -1]
        seconds = {}
        for name in names:
            rw.barrier()
            start = time.perf_counter()
            kinds[name]()
            seconds[name] = time.perf_counter() - start
        slowest: dict[str, float] = rw.all_reduce(seconds, op="max")
        found.append(slowest)
    return found[WARM_UP:]


def measure_sizes(name: str, count: int, numel: int, rounds: int) -> Row:
    """Collective. Measure the kinds of synchronization for some gradients."""
    parameters = [torch.nn.Parameter(torch.ones(numel)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(numel)
    grads, flat = grads_of(parameters), torch.ones(count * numel)
    target = torch.empty_like(flat)
    kinds: dict[str, Callable[[], object]] = {
        "flat": lambda: dist.all_reduce(flat),
        "rankwise": lambda: rw.sync_grads(parameters),
        "all_reduce_": lambda: rw.all_reduce_(grads),
        "flattened": functools.partial(reduce_flattened, grads),
        "each tensor": functools.partial(reduce_each, grads),
        "in buckets": functools.partial(reduce_in_buckets, grads),
        "copy": lambda: target.copy_(flat),
    }
    found = rounds_of(kinds, rounds)
    row: Row = {"name": name}
    for kind in kinds:
        row[kind] = statistics.median(seconds[kind] for seconds in found)
    row["ratio"] = float(row["rankwise"]) / float(row["flat"])
    return row


def measure(rounds: int) -> list[Row]:
    """Collective. Measure, as one rank."""
    torch.set_num_threads(1)
    with rw.init():
        return [measure_sizes(*size, rounds) for size in SIZES]


def options_parser(description: str | None, rounds: int, ranks: Sequence[int] = (2, 4)) -> argparse.ArgumentParser:
    """Return a parser of the usual options: numbers of ranks, the number of rounds, and a folder for the rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    return parser


def parsed_options(description: str | None, rounds: int) -> argparse.Namespace:
    """Return the options of the command line, where there are only the usual ones."""
    return options_parser(description, rounds).parse_args()


def save(rows: list[dict[str, Any]], folder: Path | None, name: str) -> None:
    """Write rows to a file, if there is a folder for it."""
    if folder is not None:
        (folder / name).write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    options = parsed_options(__doc__, ROUNDS)
    rows = []
    kinds = ("rankwise", "all_reduce_", "flattened", "each tensor", "in buckets", "copy")
    print(f"| ranks | gradients | flat all_reduce | {' | '.join(kinds)} |")
    print(f"| {' | '.join(['---'] * (3 + len(kinds)))} |")
    for ranks in options.ranks:
        for row in rw.launch(measure, options.rounds, nproc=ranks)[0]:
            flat = float(row["flat"])
            ratios = [f"{float(row[kind]) / flat:.2f}" for kind in kinds]
            print(f"| {ranks} | {row['name']} | {flat * 1e3:.2f} ms | {' | '.join(ratios)} |", flush=True)
            rows.append({"ranks": ranks, **row})
    save(rows, options.save, "gradients.json")


if __name__ == "__main__":
    main()
