"""The launchers of frameworks, where they are installed: the real programs start two ranks, which join."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.session.worlds import PROGRAMS, clean_environ, free_port

BIN = Path(sys.executable).parent
JOIN = str(PROGRAMS / "join.py")
HERE = Path(__file__).parent / "programs"

pytestmark = pytest.mark.slow


def started(command: Sequence[str], folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Run a launcher's command in a folder, and return the output of its ranks in their order."""
    if not Path(command[0]).exists():
        pytest.skip(f"{Path(command[0]).name} is not installed beside {sys.executable}")
    environ = clean_environ(TMPDIR=str(folder), **variables)
    ended = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [
        *ended.stdout.splitlines(),
        *(line for path in folder.glob("*.out") for line in path.read_text().splitlines()),
    ]
    return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda one: one["rank"])


def check(ranks: list[dict[str, Any]]) -> None:
    assert [(one["rank"], one["world_size"], one["local_rank"], one["total"]) for one in ranks] == [
        (0, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_accelerate_launch(tmp_path: Path) -> None:
    options = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    check(started([str(BIN / "accelerate"), "launch", *options, f"--main_process_port={free_port()}", JOIN], tmp_path))


@pytest.mark.rare
def test_accelerate_launch_of_one_process_is_a_world_of_one(tmp_path: Path) -> None:
    options = ("--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    (rank,) = started([str(BIN / "accelerate"), "launch", *options, JOIN], tmp_path)
    assert (rank["rank"], rank["world_size"]) == (0, 1)


def test_deepspeed(tmp_path: Path) -> None:
    options = ("--num_accelerators=2", "--no_local_rank", f"--master_port={free_port()}")
    check(started([str(BIN / "deepspeed"), *options, JOIN], tmp_path, DS_ACCELERATOR="cpu"))


def test_composer(tmp_path: Path) -> None:
    check(started([str(BIN / "composer"), "-n", "2", "--stdout", "{rank}.out", JOIN], tmp_path))


def test_the_subprocess_launcher_of_lightning(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    ranks = started([sys.executable, str(HERE / "start_with_lightning.py")], tmp_path)
    check(ranks)
    assert {one["launcher"] for one in ranks} == {"lightning"}


def test_ray_train(tmp_path: Path) -> None:
    missing = [name for name in ("ray", "pandas", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"ray[train] is not installed: {', '.join(missing)} missing")
    start = [sys.executable, str(HERE / "start_with_ray.py")]
    ranks = started(start, tmp_path, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    check(ranks)
    assert {one["launcher"] for one in ranks} == {"ray"}
