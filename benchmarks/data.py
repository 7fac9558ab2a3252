"""The start, the resume and a batch of GlobalBatches, beside torch's DistributedSampler with a BatchSampler.

python benchmarks/data.py

For rank 5 of 8 ranks, with 256 samples a rank, shuffled. Both samplers alternate in one process: the medians of the
rounds. Times are those of the CPU, which other processes on the machine change less. The start is that of an epoch, to
its first batch, with a new sampler; the resume is that of the middle of one, which DistributedSampler has to reach
through the batches before. A batch is one of the 1,000 after the first, or of as many as are whole; "of an epoch" is
the start and all batches after it, by their number, from these medians.

Memory is that of a start in a new process: what tracemalloc sees of Python at most, and by how much the peak of the
resident set grows, which has torch's too. DistributedSampler has lists of all indices: it ends at LONGEST_OF_TORCH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from rankwise.data import GlobalBatches

RANK, WORLD_SIZE = 5, 8
SAMPLES_OF_A_RANK = 256
LENGTHS = tuple(10**digits for digits in range(4, 10))
# Ten times as many would take gigabytes, and minutes for the rounds.
LONGEST_OF_TORCH = 10**7
ROUNDS = 5
BATCHES = 1000

Batches = Iterator[list[int]]
# Return the batches of an epoch, from its beginning or from a position on.
Sampler = Callable[[int, int], Batches]


def of_rankwise(length: int, position: int) -> Batches:
    sampler = GlobalBatches(length, SAMPLES_OF_A_RANK * WORLD_SIZE)
    sampler.load_state_dict({"position": position, "length": length, "seed": 0})
    return sampler._batches_of(RANK, WORLD_SIZE)  # noqa: SLF001 - as __iter__() on that rank


def of_torch(length: int, position: int) -> Batches:
    data: Any = range(length)
    sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK)
    batches = iter(BatchSampler(sampler, SAMPLES_OF_A_RANK, drop_last=False))
    return itertools.islice(batches, position // (SAMPLES_OF_A_RANK * WORLD_SIZE), None)


SAMPLERS: dict[str, Sampler] = {"GlobalBatches": of_rankwise, "DistributedSampler": of_torch}


def middle(length: int) -> int:
    """Return a position in the middle of an epoch, at which a global batch begins."""
    whole = SAMPLES_OF_A_RANK * WORLD_SIZE
    return length // 2 // whole * whole


def round_of(sampler: Sampler, length: int) -> tuple[float, float, float]:
    """Return the seconds of the CPU for a start, for a resume, and for a batch."""
    count = min(BATCHES, length // (SAMPLES_OF_A_RANK * WORLD_SIZE) - 1)
    moments = [time.process_time()]
    next(sampler(length, middle(length)))
    moments.append(time.process_time())
    batches = sampler(length, 0)
    next(batches)
    moments.append(time.process_time())
    for _ in itertools.islice(batches, count):
        pass
    moments.append(time.process_time())
    resume, start, rest = (after - before for before, after in itertools.pairwise(moments))
    return start, resume, rest / count


def peak() -> int:
    """Return the peak of the resident set of this process, in bytes; that of getrusage() begins with its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):  # VmHWM:     12345 kB
            return int(line.split()[1]) << 10
    return 0


def print_memory(name: str, length: int) -> None:
    """Print the bytes that tracemalloc has seen at most at the start, and those by which the process has grown."""
    next(SAMPLERS[name](10_000, 0))  # loads what a first call loads
    before = peak()
    batches = SAMPLERS[name](length, 0)
    next(batches)
    grown = peak() - before
    del batches
    tracemalloc.start()
    next(SAMPLERS[name](length, 0))
    print(json.dumps([tracemalloc.get_traced_memory()[1], grown]))


def memory_of(name: str, length: int) -> tuple[int, int]:
    command = [sys.executable, str(Path(__file__)), "--memory", name, str(length)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    python, process = json.loads(ended.stdout)
    return python, process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs=2, metavar=("SAMPLER", "LENGTH"), help="for the processes of this benchmark")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print_memory(options.memory[0], int(options.memory[1]))
        return
    print("| samples | sampler | start | resume | batch | of an epoch | tracemalloc | process |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for length in LENGTHS:
        names = [name for name in SAMPLERS if name == "GlobalBatches" or length <= LONGEST_OF_TORCH]
        rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                rounds[name].append(round_of(SAMPLERS[name], length))
        for name in names:
            start, resume, batch = (statistics.median(kind) for kind in zip(*rounds[name], strict=True))
            num_batches = -(-length // (SAMPLES_OF_A_RANK * WORLD_SIZE))
            of_epoch = (start + batch * (num_batches - 1)) / num_batches
            python, process = memory_of(name, length)
            print(
                f"| 10^{len(str(length)) - 1} | {name} | {start * 1e3:,.2f} ms | {resume * 1e3:,.2f} ms "
                f"| {batch * 1e6:,.1f} us | {of_epoch * 1e6:,.1f} us "
                f"| {python / 1e6:,.2f} MB | {process / 1e6:,.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
