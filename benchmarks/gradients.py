"""Synchronization of gradients: what a training step takes longer with it, beside one flat all_reduce of torch.

python benchmarks/gradients.py
python benchmarks/gradients.py --ranks 2 --rounds 5
python benchmarks/gradients.py --save FOLDER   # also FOLDER/gradients.json, in seconds

All kinds of a row alternate in one run. The time of a kind is the median, over the rounds, of its step less the step
without synchronization; a round of all ranks takes as long as the slowest of them. The kinds beside rankwise's are
the usual ones, written anew: "flattened" as mmcv does it (flatten, reduce, copy back), "each tensor", and "in buckets",
flattened in buckets of 25 MB, as mmengine does it.

The rows of the overlapped step are whole steps of a model, with the reduction during backward, beside those of DDP.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

ROUNDS = 15
WARM_UP = 3
BUCKET_BYTES = 25 << 20
# Name, number of tensors, elements of each.
SIZES = (("25 M floats in 160 tensors", 160, 156_250), ("1,000 tensors of 1 KB", 1000, 256))
# Of the model of the overlapped step: 25 M floats.
LAYERS, WIDTH, BATCH = 24, 1024, 64

Row = dict[str, float | int | str]


def backward(parameters: Sequence[torch.Tensor]) -> None:
    """Give each parameter a new gradient, as backward after `zero_grad()` does."""
    for parameter in parameters:
        parameter.grad = None
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()


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


def measure_steps(name: str, count: int, numel: int, rounds: int) -> Row:
    flat = torch.ones(count * numel)
    models = {
        kind: [torch.nn.Parameter(torch.ones(numel)) for _ in range(count)]
        for kind in ("without", "rankwise", "flattened", "each tensor", "in buckets")
    }
    syncs: dict[str, Callable[[list[torch.nn.Parameter]], object]] = {
        "without": lambda _: None,
        "rankwise": rw.sync_grads,
        "flattened": lambda parameters: reduce_flattened(grads_of(parameters)),
        "each tensor": lambda parameters: reduce_each(grads_of(parameters)),
        "in buckets": lambda parameters: reduce_in_buckets(grads_of(parameters)),
    }

    def step(kind: str) -> None:
        backward(models[kind])
        syncs[kind](models[kind])

    steps: dict[str, Callable[[], object]] = {kind: functools.partial(step, kind) for kind in models}
    target = torch.empty_like(flat)
    steps["flat"] = lambda: dist.all_reduce(flat)
    steps["copy"] = lambda: target.copy_(flat)
    found = rounds_of(steps, rounds)
    row: Row = {"name": name, "flat": statistics.median(seconds["flat"] for seconds in found)}
    row["copy"] = statistics.median(seconds["copy"] for seconds in found)
    for kind in ("rankwise", "flattened", "each tensor", "in buckets"):
        row[kind] = statistics.median(seconds[kind] - seconds["without"] for seconds in found)
    row["ratio"] = float(row["rankwise"]) / float(row["flat"])
    return row


def measure_overlap(rounds: int) -> Row:
    """Collective. Measure whole steps of a model, with the reduction during backward, and after it."""
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    models = {kind: copy.deepcopy(torch.nn.Sequential(*layers)) for kind in ("DDP", "overlapped", "afterwards")}
    wrapped = DistributedDataParallel(models["DDP"], gradient_as_bucket_view=True)
    batch = torch.rand(BATCH, WIDTH)

    def step(module: torch.nn.Module, kind: str) -> None:
        module.zero_grad()
        module(batch).sum().backward()
        if kind != "DDP":
            rw.sync_grads(module, overlap=kind == "overlapped")

    steps = {kind: functools.partial(step, wrapped if kind == "DDP" else models[kind], kind) for kind in models}
    found = rounds_of(steps, rounds)
    row: Row = {"name": f"a step of {LAYERS} layers"}
    for kind in steps:
        row[kind] = statistics.median(seconds[kind] for seconds in found)
    row["ratio"] = statistics.median(seconds["overlapped"] / seconds["DDP"] for seconds in found)
    return row


def measure(rounds: int) -> list[Row]:
    """Collective. Measure, as one rank."""
    torch.set_num_threads(1)
    with rw.init():
        return [*(measure_steps(*size, rounds) for size in SIZES), measure_overlap(rounds)]


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
    print("| ranks | gradients | flat all_reduce | rankwise | flattened | each tensor | in buckets | one copy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        *steps, overlap = rw.launch(measure, options.rounds, nproc=ranks)[0]
        for row in steps:
            flat = float(row["flat"])
            ratios = [
                f"{float(row[kind]) / flat:.2f}"
                for kind in ("rankwise", "flattened", "each tensor", "in buckets", "copy")
            ]
            print(f"| {ranks} | {row['name']} | {flat * 1e3:.2f} ms | {' | '.join(ratios)} |", flush=True)
        times = ", ".join(f"{kind} {float(overlap[kind]) * 1e3:.0f} ms" for kind in ("DDP", "overlapped", "afterwards"))
        print(f"| {ranks} | {overlap['name']}: {times}, overlapped by DDP {overlap['ratio']:.2f} |", flush=True)
        rows += [{"ranks": ranks, **row} for row in (*steps, overlap)]
    save(rows, options.save, "gradients.json")


if __name__ == "__main__":
    main()
