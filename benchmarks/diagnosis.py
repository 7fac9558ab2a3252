"""`rankwise stacks --watch` on jobs in which one of three ranks does not come: how often it is named, and when.

    python -m benchmarks.diagnosis [--injections 20] [--ranks 64]

Launchers, ranks and the workers of data loaders are chosen at random, the same in each run; no job imports rankwise.
Then the time of `rankwise stacks` on a job of many ranks, and that of a step while a job is sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tests.clusters.packages import why_not
from tests.clusters.slurm import PACKAGES, slurm
from tests.diagnose.jobs import Injection, hanging, named, place, watch

HOWS = ("loader", "stopped", "lock", "skips")
LAUNCHERS = ("torchrun", "accelerate", "openmpi", "mpich", "plain", "rankwise")
PROGRAMS = Path(__file__).parent / "programs"
LOOKS = 5
ROUNDS = 5
SECONDS = 4


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--injections", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.injections:
        print_injections(arguments.injections)
    print_many_ranks(arguments.ranks)
    print_steps()


def load() -> str:
    """Return the load of this machine."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def print_injections(number: int) -> None:
    """Print how often the rank was named, and when."""
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        names: tuple[str, ...] = LAUNCHERS
        if os.geteuid() == 0 and not why_not(PACKAGES):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            variables = stack.enter_context(slurm(folder, nodes=1))
            names = (*LAUNCHERS, "srun")
        print(f"{number} injections of each kind; launchers: {', '.join(names)}", flush=True)
        print(f"{'kind':<10}{'named':>7}{'wrong':>7}{'line':>7}{'median s':>10}{'worst s':>10}", flush=True)
        for how in HOWS:
            right = wrong = lines = 0
            seconds = []
            for seed in range(number):
                injection = Injection.of_seed(seed, how, names)
                with hanging(injection, **variables) as pid:
                    start = time.perf_counter()
                    output = watch(pid)
                    seconds.append(time.perf_counter() - start)
                found = named(output)
                right += injection.victim in found
                wrong += any(rank != injection.victim for rank in found)
                lines += place(how) in output
                if found != [injection.victim] or place(how) not in output:
                    print(f"{injection}\n{output}", file=sys.stderr, flush=True)
            times = f"{statistics.median(seconds):>10.1f}{max(seconds):>10.1f}"
            print(f"{how:<10}{right:>7}{wrong:>7}{lines:>7}{times}   {load()}", flush=True)


def print_many_ranks(number: int) -> None:
    """Print the time of one look at a job of many ranks."""
    with started(number, "sleeps.py") as (launcher, _):
        for command in ("stacks", "ps"):
            seconds = []
            for _ in range(LOOKS):
                start = time.perf_counter()
                arguments = [str(launcher.pid)] if command == "stacks" else []
                run = [sys.executable, "-m", "rankwise", command, *arguments]
                subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - start)
            times = f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
            print(f"rankwise {command}, {number} ranks, {LOOKS} looks: {times}; {load()}", flush=True)


def print_steps() -> None:
    """Print the median time of a step of two ranks, alone and while they are sampled, in turn."""
    intervals = {"alone": None, "each half second": 0.5, "without a pause": 0.001}
    times: dict[str, list[float]] = {how: [] for how in intervals}
    with started(2, "steps.py") as (launcher, lines):
        for _ in range(ROUNDS):
            for how, interval in intervals.items():
                command = [sys.executable, "-m", "rankwise", "stacks", str(launcher.pid), "--watch", "1000000"]
                options = ["--interval", str(interval)]
                sampler = interval and subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
                deadline = time.monotonic() + SECONDS
                while time.monotonic() < deadline:
                    times[how] += [float(text) for text in re.findall(r"step ([\d.]+)", lines.readline())]
                if sampler:
                    sampler.terminate()
                    sampler.wait()
    alone = statistics.median(times["alone"])
    for how, found in times.items():
        step = statistics.median(found)
        print(f"a step of two ranks, {how}: {step:.2f} ms, {step / alone:.2f} times as long; {load()}", flush=True)


@contextlib.contextmanager
def started(number: int, program: str) -> Iterator[tuple[subprocess.Popen[bytes], TextIO]]:
    """Run a job, and give its launcher and output when all ranks have begun."""
    command = [sys.executable, "-m", "rankwise", "launch", "-n", str(number), str(PROGRAMS / program)]
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, subprocess.Popen(command, stdout=writing) as launcher:
        os.close(writing)
        try:
            begun = 0
            while begun < number:
                begun += lines.readline().count("begun")
            yield launcher, lines
        finally:
            launcher.terminate()
            launcher.wait()


if __name__ == "__main__":
    main()
