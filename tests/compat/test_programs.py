"""A training script for each original, as its users write it, runs with one line changed: alone and in worlds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.adapted import PROGRAMS, adapted
from tests.lanes import variants
from tests.session.worlds import clean_environ

# The functions of each drop-in have faster tests.
pytestmark = pytest.mark.slow

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch", "--no-prefix", "-n"]


def output(command: list[str], folder: Path, **variables: str) -> list[str]:
    """Run a command that has to succeed, and return the lines that it printed, in order."""
    environ = clean_environ(**variables, TMPDIR=str(folder))  # torch leaves something there
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.mark.parametrize("size", variants([1, 2, 4], slow=[2]))
def test_virtex(size: int, tmp_path: Path) -> None:
    program = adapted("train_virtex.py", tmp_path)
    (line,) = output([sys.executable, program, f"--num-gpus-per-machine={size}"], tmp_path)
    assert line.startswith(f"of {size}: rank {(size - 1) / 2:.1f}, loss ")
    assert float(line.split()[5]) < 0.5


@pytest.mark.parametrize("size", variants([1, 2, 4], slow=[2]))
def test_vis4d(size: int, tmp_path: Path) -> None:
    program = adapted("train_vis4d.py", tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "mine").write_text("kept")
    command = [sys.executable] if size == 1 else [*LAUNCH, str(size)]
    assert output([*command, program, "--tmpdir", str(shared)], tmp_path) == [f"of {size}: 64 seen, {64 // size} each"]
    assert [path.name for path in shared.iterdir()] == ["mine"]


OF_MMCV = [("pytorch", 2), ("pytorch", 1), ("pytorch", 4), ("auto", 2)]


@pytest.mark.parametrize(("launcher", "size"), variants(OF_MMCV, slow=OF_MMCV[:1]))
def test_mmcv(size: int, launcher: str, tmp_path: Path) -> None:
    program = adapted("train_mmcv.py", tmp_path)
    *told, last = sorted(output([*LAUNCH, str(size), program, "--launcher", launcher], tmp_path), reverse=True)
    assert last.startswith(f"rank 0 of {size}: loss ")
    assert sorted(line.split()[1:5] for line in told) == [
        [str(rank), str(size), str(rank), "127.0.0.1"] for rank in range(size)
    ]
    assert len({line.split()[5] for line in told}) == 1


@pytest.mark.rare
def test_mmcv_alone(tmp_path: Path) -> None:
    program = adapted("train_mmcv.py", tmp_path)
    (line,) = output([sys.executable, program], tmp_path)
    assert line.startswith("rank 0 of 1: loss ")
    told, _ = sorted(output([sys.executable, program, "--launcher", "auto"], tmp_path), reverse=True)
    assert told.startswith("told 0 1 0 127.0.0.1 ")


@pytest.mark.parametrize("size", variants([1, 2, 4], slow=[2]))
def test_torch_launch(size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rankwise.compat.torch_launch", "--no_prefix", f"--nproc_per_node={size}"]
    script = str(PROGRAMS / "train_launch.sh")
    assert os.access(script, os.X_OK)
    lines = output([*command, script], tmp_path, PYTHON=sys.executable)
    assert lines == [f"{rank} of {size}: local {rank}, told None, on tiny" for rank in range(size)]
    lines = output([*command, "--use_env=False", script], tmp_path, PYTHON=sys.executable)
    assert lines == [f"{rank} of {size}: local {rank}, told {rank}, on tiny" for rank in range(size)]
