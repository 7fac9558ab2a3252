"""A benchmark with this source and with that of a commit, in turn: the rows of both, and their ratio.

python -m benchmarks.against HEAD~3 collectives
python -m benchmarks.against main growth --only calls --ranks 2 4

The program is the one of this working tree both times, with another `rankwise` on PYTHONPATH, so it must use names that
both have. Rounds of torch beside those of rankwise show whether the machine was busier in one half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDS = 3

Key = tuple[int, str]


def source_of(commit: str, folder: Path) -> Path:
    """Unpack the source of a commit, and return the folder for PYTHONPATH."""
    archive = folder / "source.tar"
    subprocess.run(["git", "archive", f"--output={archive}", commit, "src"], cwd=ROOT, check=True)  # noqa: S607
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / "src"


def rows_with(source: Path, benchmark: str, options: list[str], folder: Path) -> dict[Key, dict[str, Any]]:
    """Run a benchmark with a source, and return its rows."""
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", *options, "--save", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = json.loads((folder / f"{benchmark}.json").read_text())
    return {(row["ranks"], row["name"]): row for row in rows if row.get("ratio") is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("benchmark", choices=("collectives", "growth"))
    arguments, options = parser.parse_known_args()
    runs: dict[str, list[dict[Key, dict[str, Any]]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        sources = {"before": source_of(arguments.commit, Path(folder)), "now": ROOT / "src"}
        for _ in range(ROUNDS):
            for side, source in sources.items():
                runs[side].append(rows_with(source, arguments.benchmark, options, Path(folder)))
    print(f"| ranks | call | {arguments.commit} | now | ratio | torch, now to then |")
    print("| --- | --- | --- | --- | --- | --- |")
    for key in runs["now"][0]:
        medians = {
            (side, library): statistics.median(rows[key][library] for rows in runs[side])
            for side in runs
            for library in ("rankwise", "torch")
        }
        before, now = medians["before", "rankwise"], medians["now", "rankwise"]
        ratio = statistics.median(
            one[key]["rankwise"] / two[key]["rankwise"] for one, two in zip(runs["now"], runs["before"], strict=True)
        )
        torchs = medians["now", "torch"] / medians["before", "torch"]
        print(f"| {key[0]} | {key[1]} | {before * 1e6:,.0f} us | {now * 1e6:,.0f} us | {ratio:.2f} | {torchs:.2f} |")


if __name__ == "__main__":
    main()
