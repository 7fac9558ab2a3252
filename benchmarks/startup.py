"""How long until ranks have reduced for the first time, and until all is over: beside torchrun and mp.spawn.

python benchmarks/startup.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 5
BIN = Path(sys.executable).parent
SCRIPT = str(Path(__file__).parent / "programs" / "first.py")


def commands(nproc: int, *args: str) -> dict[str, list[str]]:
    return {
        "rankwise launch": [
            str(BIN / "rankwise"),
            "launch",
            "-n",
            str(nproc),
            "--no-prefix",
            SCRIPT,
            "launched",
            *args,
        ],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(nproc), SCRIPT, "launched", *args],
        "mp.spawn": [sys.executable, SCRIPT, "spawn", str(nproc), *args],
    }


def seconds(command: list[str], nproc: int) -> tuple[float, float]:
    """Return when the last rank had reduced, and when the launcher had ended."""
    start = time.time()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    end = time.time()
    reduced = [float(line) for line in ended.stdout.splitlines()]
    if len(reduced) != nproc:
        raise RuntimeError(ended.stdout + ended.stderr)
    return max(reduced) - start, end - start


def main() -> None:
    print("| ranks | program | started by | first `all_reduce` | ratio | all over | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for nproc, name, args in ((8, "torch", []), (2, "torch", []), (8, "torch and scikit-learn", ["sklearn"])):
        took: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            for launcher, command in commands(nproc, *args).items():
                took.setdefault(launcher, []).append(seconds(command, nproc))
        for launcher, times in took.items():
            columns = []
            for place in (0, 1):
                ratio = statistics.median(
                    ours[place] / theirs[place] for ours, theirs in zip(took["rankwise launch"], times, strict=True)
                )
                columns += [f"{statistics.median(pair[place] for pair in times):.2f} s", f"{ratio:.2f}"]
            print(f"| {nproc} | {name} | `{launcher}` | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
