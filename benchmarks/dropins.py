"""Drop-ins beside the methods of their originals, which are written anew here: alternating in one run.

python -m benchmarks.dropins
python -m benchmarks.dropins --ranks 2 --rounds 5
python -m benchmarks.dropins --save FOLDER   # also FOLDER/dropins.json, in seconds

The last column is the time of the original by that of the drop-in: below 1 the drop-in is slower. Both are medians over
the rounds; a round of all ranks takes as long as the slowest of them.
"""

from __future__ import annotations

import pickle
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankwise as rw
from benchmarks.collectives import pad_to_largest
from benchmarks.gradients import parsed_options, reduce_each, reduce_flattened, reduce_in_buckets, rounds_of, save
from rankwise.compat import mmcv, virtex, vis4d

ROUNDS = 15
COUNT, NUMEL = 160, 156_250

Pair = tuple[Callable[[], object], Callable[[], object]]


def average_tensor(tensor: torch.Tensor) -> None:
    """Average as virtex does."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def average_dict(values: dict[str, torch.Tensor]) -> None:
    """Average as virtex does."""
    for value in values.values():
        average_tensor(value)


def reduce_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Average as vis4d does."""
    tensor = tensor.clone()
    dist.all_reduce(tensor.div_(dist.get_world_size()), op=dist.ReduceOp.SUM)
    return tensor


def reduce_dict(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum as vis4d does: the keys of rank zero as an object, then all values as one tensor."""
    keys: list[Any] = [list(values)]
    dist.broadcast_object_list(keys, src=0)
    flat = torch.cat([values[key].flatten() for key in keys[0]])
    dist.all_reduce(flat)
    parts = flat.split([values[key].numel() for key in keys[0]])
    return {key: part.view_as(values[key]) for key, part in zip(keys[0], parts, strict=True)}


def gather_by_files(value: object, folder: str) -> list[object] | None:
    """Gather as vis4d does: each rank writes a file to a folder, and rank zero reads all of them and removes it."""
    rank, files = dist.get_rank(), Path(folder, "files")
    files.mkdir(exist_ok=True)
    (files / f"part_{rank}.pkl").write_bytes(pickle.dumps(value))
    dist.barrier()
    if rank:
        return None
    values = [pickle.loads((files / f"part_{other}.pkl").read_bytes()) for other in range(dist.get_world_size())]
    shutil.rmtree(files)
    return values


def gather_padded(value: object) -> list[object]:
    """Gather as vis4d does: pickles as tensors, padded to the largest."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(part.numpy().tobytes()) for part in pad_to_largest(data)]


def with_grads() -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(COUNT)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def grads(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.data for parameter in parameters if parameter.grad is not None]


def pairs(folder: str) -> dict[str, Pair]:
    """Return the original and the drop-in of each call."""
    theirs, ours = with_grads(), [with_grads() for _ in range(3)]
    tensors = [parameter.data for parameter in theirs]
    own = [parameter.data.clone() for parameter in theirs]
    large, scalars = torch.ones(COUNT * NUMEL), {f"metric {number}": torch.tensor(0.5) for number in range(50)}
    scalar, value = torch.tensor(0.5), {"rank": rw.get_rank(), "boxes": torch.ones(1000, 4)}
    return {
        "mmcv `allreduce_grads`": (lambda: reduce_flattened(grads(theirs)), partial(mmcv.allreduce_grads, ours[0])),
        "mmcv `allreduce_grads(bucket_size_mb=25)`": (
            lambda: reduce_in_buckets(grads(theirs)),
            partial(mmcv.allreduce_grads, ours[1], bucket_size_mb=25),
        ),
        "mmcv `allreduce_grads(coalesce=False)`": (
            lambda: reduce_each(grads(theirs)),
            partial(mmcv.allreduce_grads, ours[2], coalesce=False),
        ),
        "mmcv `allreduce_params`": (lambda: reduce_flattened(tensors), partial(mmcv.allreduce_params, own)),
        "mmcv `allreduce_params(bucket_size_mb=25)`": (
            lambda: reduce_in_buckets(tensors),
            partial(mmcv.allreduce_params, own, bucket_size_mb=25),
        ),
        "mmcv `allreduce_params(coalesce=False)`": (
            lambda: reduce_each(tensors),
            partial(mmcv.allreduce_params, own, coalesce=False),
        ),
        "virtex `average_across_processes` of 25 M": (
            partial(average_tensor, large),
            partial(virtex.average_across_processes, large),
        ),
        "virtex `average_across_processes` of 50 scalars": (
            partial(average_dict, scalars),
            partial(virtex.average_across_processes, scalars),
        ),
        "vis4d `reduce_mean` of a scalar": (partial(reduce_mean, scalar), partial(vis4d.reduce_mean, scalar)),
        "vis4d `reduce_mean` of 25 M": (partial(reduce_mean, large), partial(vis4d.reduce_mean, large)),
        "vis4d `all_reduce_dict` of 50 scalars": (
            partial(reduce_dict, scalars),
            partial(vis4d.all_reduce_dict, scalars),
        ),
        "vis4d `all_gather_object_cpu`": (
            partial(gather_by_files, value, folder),
            partial(vis4d.all_gather_object_cpu, value),
        ),
        "vis4d `all_gather_object_cpu(tmpdir=)`": (
            partial(gather_by_files, value, folder),
            partial(vis4d.all_gather_object_cpu, value, tmpdir=folder),
        ),
        "vis4d `all_gather_object_gpu`": (partial(gather_padded, value), partial(vis4d.all_gather_object_gpu, value)),
    }


def measure(rounds: int, folder: str) -> list[dict[str, Any]]:
    """Collective. Measure, as one rank."""
    torch.set_num_threads(1)
    rows = []
    with rw.init():
        for name, (original, dropin) in pairs(folder).items():
            found = rounds_of({"original": original, "drop-in": dropin}, rounds)
            medians = {kind: statistics.median(seconds[kind] for seconds in found) for kind in found[0]}
            ratio = statistics.median(seconds["original"] / seconds["drop-in"] for seconds in found)
            rows.append({"name": name, **medians, "ratio": ratio})
    return rows


def main() -> None:
    options = parsed_options(__doc__, ROUNDS)
    rows = []
    print("| ranks | call | original | drop-in | speed |\n| --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            for row in rw.launch(measure, options.rounds, folder, nproc=ranks)[0]:
                times = f"{row['original'] * 1e3:.2f} ms | {row['drop-in'] * 1e3:.2f} ms"
                print(f"| {ranks} | {row['name']} | {times} | {row['ratio']:.2f} |", flush=True)
                rows.append({"ranks": ranks, **row})
    save(rows, options.save, "dropins.json")


if __name__ == "__main__":
    main()
