"""What the watch for reports of hangs costs while nothing hangs: a step of examples/digits.py, with it and without.

python benchmarks/hang_report.py
python benchmarks/hang_report.py --ranks 2 --rounds 10 --seconds 60
python benchmarks/hang_report.py --ddp
python benchmarks/hang_report.py --save FOLDER   # also FOLDER/hang_report.json

Launches with a watch and without alternate in one run: torch reads the size of its flight recorder, which the watch
sets, once in a process. A round of all ranks takes as long as the slowest of them, which differs from round to round
by more than the watch costs. So the processor time of a step is measured too, of all ranks together and of the process
that watches; ratios are medians over pairs of rounds, each in the other order than the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# Of a round; the processor time of a step is taken from the lowest tenth of them, which other work disturbs least.
EPOCHS = 30
# Until the process has been started.
START_SECONDS = 2.0


digits = importlib.import_module("digits")


def step_seconds(ddp: bool) -> tuple[float, float]:
    """Return how long a step takes on the slowest rank, in a session that is open, and its processor time on all."""
    images, labels, *_ = digits.load(rw.device())
    model = digits.build(rw.device())
    trained = DistributedDataParallel(model) if ddp else model
    digits.train(trained, images, labels, epochs=1, batch=64, learning_rate=5e-3)
    steps, chunks = -(-len(labels) // 64), []
    start = time.monotonic()
    for _ in range(EPOCHS):
        used = time.process_time()
        digits.train(trained, images, labels, epochs=1, batch=64, learning_rate=5e-3)
        chunks.append((time.process_time() - used) / steps)
    seconds = (time.monotonic() - start) / (EPOCHS * steps)
    return max(rw.all_gather(seconds)), rw.all_reduce(statistics.quantiles(chunks, n=10)[0])


def measure(seconds: float, ddp: bool) -> tuple[float, float, float]:
    """Return the seconds and the processor time of a step, and the cores that the watch takes."""
    torch.set_num_threads(1)
    shown = contextlib.redirect_stderr(io.StringIO())  # the progress
    with rw.init(device="cpu", hang_report=seconds), shown:
        time.sleep(START_SECONDS)
        before, start = watch_seconds(), time.monotonic()
        step, used = step_seconds(ddp)
        return step, used, (watch_seconds() - before) / (time.monotonic() - start)


def measure_pairs(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return what each pair of rounds has measured: without a watch, and with one."""
    found: dict[str, list[float]] = {"without": [], "with": [], "used without": [], "used with": [], "cores": []}
    for number in range(options.rounds):
        for name in ("without", "with") if number % 2 else ("with", "without"):
            seconds = options.seconds if name == "with" else 0.0
            step, used, cores = rw.launch(measure, seconds, options.ddp, nproc=options.ranks)[0]
            found[name].append(step)
            found[f"used {name}"].append(used + cores * step)  # the watch's part of a step
            if seconds:
                found["cores"].append(cores)
    return found


def paired_ratio(watched: list[float], without: list[float]) -> float:
    return statistics.median(one / two for one, two in zip(watched, without, strict=True))


def watch_seconds() -> float:
    """Return the CPU time of the process that watches; `cpu_times` of psutil counts in hundredths of a second."""
    watchers = [
        child.pid for child in psutil.Process().children() if any("watcher" in word for word in child.cmdline())
    ]
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in watchers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="those of hang_report")
    parser.add_argument("--ddp", action="store_true", help="let DistributedDataParallel average the gradients")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    found = measure_pairs(options)
    without, watched = (statistics.median(found[name]) for name in ("without", "with"))
    row = {
        "ranks": options.ranks,
        "step_without": without,
        "step_with": watched,
        "ratio": paired_ratio(found["with"], found["without"]),
        "used_ratio": paired_ratio(found["used with"], found["used without"]),
        "cores": statistics.median(found["cores"]),
        "load": os.getloadavg()[0],
    }
    print(f"step without a watch {without * 1e3:.3f} ms, with one {watched * 1e3:.3f} ms, ratio {row['ratio']:.4f}")
    print(f"processor time of a step, of all ranks and the watch, ratio {row['used_ratio']:.4f}")
    print(f"the watch takes {row['cores']:.3%} of a core after its start; load {row['load']:.1f}")
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "hang_report.json").write_text(json.dumps([row | {"rounds": found}]))


if __name__ == "__main__":
    main()
