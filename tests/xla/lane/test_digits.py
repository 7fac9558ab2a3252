"""The example, unchanged, on XLA devices: as accurate as in other worlds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.xla.cpu_devices import variables
from tests.xla.device_ranks import DEVICES

ROOT = Path(__file__).parents[3]


def test_the_example_is_as_accurate_as_in_other_worlds(tmp_path: Path) -> None:
    environ = os.environ | variables(DEVICES) | {"COLUMNS": "100", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.xla.programs.threads", str(ROOT / "examples" / "digits.py")]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert ended.returncode == 0, ended.stderr
    row = re.search(r"│ +([0-9]+) │ +(\w+) │ +\w+ │ +([0-9]+) │ +([0-9]+) │", ended.stdout)
    assert row is not None, ended.stdout
    ranks, samples, right = int(row[1]), int(row[3]), int(row[4])
    assert (ranks, samples) == (DEVICES, 400), "each sample once"
    # The ranks draw from the one generator of the process, so that each run trains another model: 96.5 % has been seen.
    assert right / samples >= 0.95, ended.stdout
