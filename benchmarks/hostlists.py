"""How long Slurm's lists of 100,000 hosts take to read: the first host, which every rank needs, and all of them.

python benchmarks/hostlists.py
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rankwise._environment.hostlist import MAX_HOSTS, expand, first
from rankwise.errors import LauncherEnvironmentError

ROUNDS = 21
HOSTS = 100_000
LISTS = {
    "two ranges": "node[00001-50000],gpu[00001-50000]",
    "a bracket of 50,000 numbers, twice": ",".join(
        f"{name}[{','.join(str(2 * number) for number in range(HOSTS // 2))}]" for name in ("node", "gpu")
    ),
    "100,000 names": ",".join(f"node{number}" for number in range(HOSTS)),
}
REFUSED = {
    f"more than {MAX_HOSTS:,} hosts": ",".join(f"rack{rack}node[1-65536]" for rack in range(1000)),
    "a range of a billion": "node[1-1000000000]",
    "a billion combinations": "a[0-999]b[0-999]c[0-999]",
}


def seconds(function: Callable[[str], object], text: str) -> float:
    """Return the shortest duration of a call."""
    durations = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with contextlib.suppress(LauncherEnvironmentError):
            function(text)
        durations.append(time.perf_counter() - start)
    return min(durations)


def main() -> None:
    print("| list | first host | goal | all hosts | goal |")
    print("| --- | --- | --- | --- | --- |")
    for name, text in LISTS.items():
        print(f"| {name} | {1e3 * seconds(first, text):.3f} ms | 1 ms | {seconds(expand, text):.3f} s | 0.2 s |")
    for name, text in REFUSED.items():
        print(f"| {name}: refused | | | {seconds(expand, text):.3f} s | |")


if __name__ == "__main__":
    main()
