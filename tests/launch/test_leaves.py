"""A plain launch imports nothing that only other launches, devices and commands need: no fault there can stop it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise as rw

SOURCE = Path(rw.__file__).parent
PROGRAMS = Path(__file__).parent / "programs"
LEAVES = (
    "_launch/engines/*.py",
    "_launch/hosts/*.py",
    "_launch/other_hosts/*.py",
    "cli/launch_hosts.py",
    "_diagnose/*.py",
    "_torch_xla.py",
    "_comm/data/xla.py",
    "_environment/xla_processes.py",
    "_launch/xla_devices.py",
    "_session/device_threads.py",
    "_session/xla_session.py",
    "compat/**/*.py",
    "extend/*.py",
    "testing/**/*.py",
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package in which every file of the leaves has a syntax error."""
    folder = tmp_path_factory.mktemp("broken")
    package = Path(shutil.copytree(SOURCE, folder / "rankwise", ignore=shutil.ignore_patterns("__pycache__")))
    for pattern in LEAVES:
        files = list(package.glob(pattern))
        assert files, f"{pattern} is no file of the package"
        for file in files:
            file.write_text("a syntax error\n")
    return folder


@pytest.mark.parametrize(
    "command",
    [("-m", "rankwise", "launch", "-n", "2"), pytest.param((), marks=pytest.mark.slow)],
    ids=["a script", "a function"],
)
def test_a_fault_in_a_leaf_does_not_stop_a_plain_launch(command: tuple[str, ...], broken: Path) -> None:
    program = PROGRAMS / ("plain_script.py" if command else "plain_function.py")
    environ = {**os.environ, "PYTHONPATH": str(broken)}
    done = subprocess.run(
        [sys.executable, *command, str(program)], env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"joined with {broken}") == 2
