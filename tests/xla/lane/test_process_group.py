"""Sessions in a process that has opened a process group of torch_xla."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla.cpu_devices import variables
from tests.xla.device_ranks import DEVICES

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(DEVICES > 1, reason="torch has one process group for all threads of a process")
def test_a_session_beside_a_process_group_of_torch_xla() -> None:
    environ = os.environ | variables(1) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.xla.programs.process_group"]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert ended.stdout == "done\n", ended.stderr
