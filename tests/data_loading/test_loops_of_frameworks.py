"""Loops of Lightning, accelerate and ignite, and a plain one of DDP, with all parts of a training loop, unwrapped."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

PROGRAM = str(Path(__file__).parent / "programs" / "framework_loops.py")
LAUNCH = [str(Path(sys.executable).parent / "rankwise"), "launch", "-n", "2", PROGRAM]

pytestmark = pytest.mark.slow


def ranks_of(framework: str, folder: Path, name: str, **variables: str) -> list[dict[str, Any]]:
    """Run a loop with a folder for its checkpoints, and return what its ranks print, in their order."""
    ended = subprocess.run(
        [*LAUNCH, framework, str(folder / name)],
        env=clean_environ(TMPDIR=str(folder), **variables), cwd=folder,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda one: one["rank"])


@pytest.mark.parametrize("framework", variants(["plain", "ignite", "accelerate", "lightning"], slow=["ignite"]))
def test_a_loop_stops_goes_on_and_ends_as_an_undisturbed_plain_one(framework: str, tmp_path: Path) -> None:
    if framework != "plain" and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    whole = ranks_of("plain", tmp_path, "whole")
    stopped = ranks_of(framework, tmp_path, "parts", SIGNAL="1")
    resumed = ranks_of(framework, tmp_path, "parts")
    assert [(one["start"], one["step"]) for one in (*whole, *stopped, *resumed)] == [
        *[(None, 12)] * 2, *[(None, 5)] * 2, *[(5, 12)] * 2,
    ]  # fmt: skip
    assert len({one["drawn"] for one in whole}) == 2, "each rank has random numbers of its own"
    for ranks in (whole, stopped, resumed):
        assert len({one["loss"] for one in ranks}) == 1
    for one in resumed:
        assert one["outputs"] == whole[0]["outputs"]
    mean = (5 * stopped[0]["loss"] + 7 * resumed[0]["loss"]) / 12  # each step has as many samples
    assert mean == pytest.approx(whole[0]["loss"], rel=1e-6)
