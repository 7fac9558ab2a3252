"""The time of one more test in a world of four ranks: in the pytest plugin, with mp.spawn, and in torch's own harness.

python benchmarks/testing.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 3
PROGRAMS = Path(__file__).parent / "programs"
# How many tests the longer run of each has: one more takes as long as this one took longer than the shorter run.
TESTS = {"rankwise": 51, "spawn": 3, "torch": 3}
NAMES = {"rankwise": "`@pytest.mark.ranks(4)`", "spawn": "`mp.spawn`", "torch": "`MultiProcessTestCase`"}


def seconds(harness: str, tests: int) -> float:
    """Return how long a run of pytest takes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    # Torch's stores ask the name server for every address that connects, and where an answer is lost wait 5 s.
    environ = {**os.environ, "TESTS": str(tests), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    start = time.perf_counter()
    subprocess.run(
        [*command, f"harness_{harness}.py"], cwd=PROGRAMS, env=environ, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def main() -> None:
    first: dict[str, list[float]] = {harness: [] for harness in TESTS}
    further: dict[str, list[float]] = {harness: [] for harness in TESTS}
    for _ in range(ROUNDS):
        for harness, tests in TESTS.items():
            short, long = seconds(harness, 1), seconds(harness, tests)
            first[harness].append(short)
            further[harness].append((long - short) / (tests - 1))
    print("| four ranks, one `all_reduce` | a run of one test | ratio to `mp.spawn` | each further test | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for harness in TESTS:
        print(
            f"| {NAMES[harness]} | {statistics.median(first[harness]):.2f} s | {ratio(harness, first):.2f} "
            f"| {1000 * statistics.median(further[harness]):.0f} ms | {ratio(harness, further):.3f} |"
        )


def ratio(harness: str, times: dict[str, list[float]]) -> float:
    """Return the median of the ratios to `mp.spawn`, of each round."""
    return statistics.median(ours / theirs for ours, theirs in zip(times[harness], times["spawn"], strict=True))


if __name__ == "__main__":
    main()
