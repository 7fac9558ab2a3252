"""How sure `rankwise trace` is, and what a trace costs: four ranks here, in steps of 50 ms with one `all_reduce` each.

python -m benchmarks.trace

1. In each of 100 steps, another rank is late by 20 %: in how many the trace names it.
2. One rank is late by 20 % in all steps: the time without that, by the trace, beside that of steps in which it is not.
3. Steps with a trace beside steps without, in turn, in blocks of ten.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import rankwise as rw
from rankwise._session.session import state_behind
from rankwise._session.torch_calls import TorchCalls
from rankwise._trace.reading import Run, read_run
from rankwise._trace.recording import Recording

RANKS = 4
SECONDS = 0.05
LATE_SECONDS = 0.2 * SECONDS
DELAYS = 100
BLOCK = 10
BLOCKS = 30
CALLS = 20_000


def step(late: float = 0.0) -> None:
    time.sleep(SECONDS + late)
    rw.all_reduce(1.0)


def chosen() -> list[int]:
    """Return which rank is late in each step."""
    choice = random.Random(0)  # noqa: S311
    return [choice.randrange(RANKS) for _ in range(DELAYS)]


def program(kind: str) -> None:
    """Run the steps of a rank."""
    torch.set_num_threads(1)
    with rw.init(device="cpu") as session:
        rw.barrier()
        if kind == "named":
            for late in chosen():
                step(LATE_SECONDS if session.rank == late else 0.0)
        elif kind in {"late", "even"}:
            for _ in range(DELAYS):
                step(LATE_SECONDS if session.rank == 2 and kind == "late" else 0.0)
        else:
            overhead(session)


def overhead(session: rw.Session) -> None:
    """Time blocks of steps with a trace and without, in turn."""
    comm = state_behind(session).comm
    with tempfile.TemporaryDirectory() as folder:
        recorder = TorchCalls(Recording(Path(folder), rank=session.rank, world_size=RANKS))
        start = time.thread_time()
        for number in range(CALLS):
            recorder.end(recorder.begin(0, number, "all_reduce at train.py:88"))
        cost = (time.thread_time() - start) / CALLS
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for block in range(BLOCKS):
            for is_traced in (True, False) if block % 2 else (False, True):
                comm.record_calls(recorder if is_traced else None)
                rw.barrier()
                start = time.perf_counter()
                for _ in range(BLOCK):
                    step()
                seconds[is_traced].append((time.perf_counter() - start) / BLOCK)
        comm.record_calls(None)
    if session.rank == 0:
        with_trace, without = (statistics.median(seconds[is_traced]) for is_traced in (True, False))
        ratio = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
        print(f"a step with a trace {1e3 * with_trace:.3f} ms, without {1e3 * without:.3f} ms: {ratio - 1:+.2%}")
        print(f"processor time of recording a call: {1e6 * cost:.2f} us")


def run(kind: str) -> Run | None:
    """Start the ranks, and return their traces."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "rankwise", "launch", "-n", str(RANKS), "--no-prefix"]
        environ = {**os.environ, "RANKWISE_TRACE": folder}
        if kind == "overhead":
            del environ["RANKWISE_TRACE"]
        subprocess.run([*launch, __file__, "--rank", kind], env=environ, check=True)
        return None if kind == "overhead" else read_run(Path(folder))


def main() -> None:
    """Print the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        program(arguments.rank)
        return
    named = run("named")
    late, even = run("late"), run("even")
    if named is None or late is None or even is None:
        raise AssertionError
    waits = [wait.rank for wait in named.waits if wait.call.text.startswith("all_reduce")]
    right = sum(found == late for found, late in zip(waits, chosen(), strict=True))
    print(f"1. named: {right} of {DELAYS} late ranks")
    cost = sum(wait.seconds for wait in late.waits if wait.rank == 2)
    by_trace, in_fact = 1 - cost / late.seconds, even.seconds / late.seconds
    print(f"2. without the lateness: {by_trace:.3f} of the time by the trace, {in_fact:.3f} in fact")
    run("overhead")


if __name__ == "__main__":
    main()
