"""What a run of the tests shows of the package: the outcome of each test, and the text of every error that is raised.

    python -m tools.behaviour record before -m "not slow"   # runs pytest with these arguments; writes before/
    python -m tools.behaviour compare before after --noise again

A change that moves code, or takes a part out, should change only what belongs to that part. Numbers and paths in the
texts are masked. Some texts depend on timing, and differ between two runs of the same code: `--noise` names another run
of the code before, and a text that only one of these two runs has is left out.

The errors of all processes are recorded, also those of ranks and of commands that tests start: while `record` runs, a
.pth file in the virtual environment lets every interpreter import `tools/record_errors.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.record_errors import FOLDER_VARIABLE
from tools.results import tests_of
from tools.virtualenv import ROOT

_PTH: Final = Path(sysconfig.get_path("purelib"), "rankwise_record_errors.pth")
# In this order: what comes first may contain what comes later.
_MASKS: Final = (
    (re.compile(r"\n\nTraceback .*", re.DOTALL), " [traceback]"),
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"(?<![\w.])[\w.~-]*(?:/[\w.@%+-]+){2,}/?"), "PATH"),
    (re.compile(r"\b[0-9a-f]{12,}\b"), "HEX"),
    (re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"), "N"),
    (re.compile(r"N(?:(?:, | and |-)N)+"), "N"),
)
_LONGEST: Final = 600


def masked(text: str) -> str:
    """Return the text of an error in one line, without what differs from run to run."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return " | ".join(text[:_LONGEST].splitlines())


def record(folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest, write what it has shown to a folder, and return its exit status."""
    raw = folder.absolute() / "raw"
    raw.mkdir(parents=True)
    code = f"import sys; sys.path.append({str(ROOT / 'tools')!r}); import record_errors; record_errors.to({str(raw)!r})"
    _PTH.write_text(f"{code}; sys.path.remove({str(ROOT / 'tools')!r})\n")
    try:
        results = f"--junitxml={folder.absolute() / 'results.xml'}"
        command = [sys.executable, "-m", "pytest", "-p", "tools.record_errors", results, *arguments]
        environ = {**os.environ, FOLDER_VARIABLE: str(raw)}
        status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    finally:
        _PTH.unlink()
    texts = {f"{kind}: {masked(text)}" for file in raw.iterdir() for kind, text in _lines(file)}
    (folder / "errors.txt").write_text("".join(f"{text}\n" for text in sorted(texts)))
    outcomes = sorted({test.name: test.outcome for test in tests_of(folder / "results.xml")}.items())
    (folder / "outcomes.txt").write_text("".join(f"{outcome} {name}\n" for name, outcome in outcomes))
    return status


def _lines(file: Path) -> list[list[str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _set_of(folder: Path, name: str) -> set[str]:
    return set((folder / name).read_text().splitlines())


def differences(before: Path, after: Path, noise: Path | None = None) -> list[str]:
    """Return the lines that only one of two records has, those of tests first."""
    tests, later = _set_of(before, "outcomes.txt"), _set_of(after, "outcomes.txt")
    errors, other = _set_of(before, "errors.txt"), _set_of(after, "errors.txt")
    varying = set() if noise is None else errors ^ _set_of(noise, "errors.txt")
    return [
        *(f"- {line}" for line in sorted(tests - later)),
        *(f"+ {line}" for line in sorted(later - tests)),
        *(f"- {line}" for line in sorted(errors - other - varying)),
        *(f"+ {line}" for line in sorted(other - errors - varying)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a run, or compare two; the exit status of a comparison is 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run pytest with the arguments that follow the folder")
    recording.add_argument("folder", type=Path)
    recording.add_argument("arguments", nargs=argparse.REMAINDER)
    comparing = commands.add_parser("compare", help="print what differs between two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--noise", type=Path, help="another record of the code before")
    chosen = parser.parse_args(arguments)
    if chosen.command == "record":
        return record(chosen.folder, chosen.arguments)
    found = differences(chosen.before, chosen.after, chosen.noise)
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
