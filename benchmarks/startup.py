"""How long until ranks have reduced for the first time, and until all is over, and the memory of all processes then.

Beside torchrun and mp.spawn. The rows with scikit-learn are skipped where it is not installed.

python benchmarks/startup.py
"""

from __future__ import annotations

import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 5
BIN = Path(sys.executable).parent
SCRIPT = str(Path(__file__).parent / "programs" / "first.py")


def commands(nproc: int, *args: str) -> dict[str, list[str]]:
    ours = [str(BIN / "rankwise"), "launch", "-n", str(nproc), "--no-prefix"]
    preloading = [*ours, "--preload", "sklearn.linear_model", SCRIPT, "launched", *args]
    return {
        "rankwise launch": [*ours, SCRIPT, "launched", *args],
        **({"rankwise launch --preload": preloading} if "sklearn" in args else {}),
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(nproc), SCRIPT, "launched", *args],
        "mp.spawn": [sys.executable, SCRIPT, "spawn", str(nproc), *args],
    }


def run(command: list[str], nproc: int) -> tuple[str, float, float, float]:
    """Return what was printed, when the command was started and had ended, and the time of the CPU that it took."""
    start, cpu = time.time(), cpu_seconds()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK": str(os.getpid())}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    if len(ended.stdout.splitlines()) < nproc:
        raise RuntimeError(ended.stdout + ended.stderr)
    return ended.stdout, start, time.time(), cpu_seconds() - cpu


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds(command: list[str], nproc: int) -> tuple[float, float, float]:
    """Return when the last rank had reduced, when the launcher had ended, and the time of the CPU."""
    output, start, end, cpu = run(command, nproc)
    return max(map(float, output.splitlines())) - start, end - start, cpu


def megabytes(command: list[str], nproc: int) -> float:
    """Return the memory (PSS) of all processes when the ranks have reduced."""
    output, *_ = run([*command, "memory"], nproc)
    return next(int(line.split()[1]) for line in output.splitlines() if line.startswith("memory")) / 1e6


def main() -> None:
    print("| ranks | program | started by | first `all_reduce` | ratio | all over | ratio | CPU | ratio | PSS |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    programs: list[tuple[int, str, list[str]]] = [(8, "torch", []), (2, "torch", [])]
    if importlib.util.find_spec("sklearn"):
        programs.append((8, "torch and scikit-learn", ["sklearn"]))
    else:
        print("scikit-learn is not installed: its rows are skipped", file=sys.stderr)
    for nproc, name, args in programs:
        took: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(ROUNDS):
            for launcher, command in commands(nproc, *args).items():
                took.setdefault(launcher, []).append(seconds(command, nproc))
        for launcher, times in took.items():
            columns = []
            for place in range(3):
                ratio = statistics.median(
                    mine[place] / theirs[place] for mine, theirs in zip(times, took["torchrun"], strict=True)
                )
                columns += [f"{statistics.median(each[place] for each in times):.2f} s", f"{ratio:.2f}"]
            memory = megabytes(commands(nproc, *args)[launcher], nproc)
            print(f"| {nproc} | {name} | `{launcher}` | {' | '.join(columns)} | {memory:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
