"""PyTorch-Ignite itself runs on the drop-in: engine, metrics, checkpoints and loggers, alone and on many ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parents[1] / "programs" / "ignite_trains.py")
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"]


def trained(folder: Path, command: list[str], how: str, *more: str) -> tuple[dict[str, Any], str]:
    """Return the report of a training, and its log."""
    place = folder / "checkpoints"
    place.mkdir(parents=True)
    ended = subprocess.run(
        [*command, PROGRAM, how, str(place), *more],
        env=clean_environ(TMPDIR=str(folder)), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.removeprefix("[0] "))
    return report, ended.stderr


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Ignite as it is reports, alone."""
    return trained(tmp_path_factory.mktemp("reference"), [sys.executable], "alone", "original")[0]


@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param([sys.executable], "alone", id="alone", marks=pytest.mark.rare),
        pytest.param([sys.executable], "env", id="in a group of one", marks=pytest.mark.rare),
        pytest.param([sys.executable], "2", id="2 spawned", marks=pytest.mark.rare),
        pytest.param([sys.executable], "4", id="4 spawned", marks=pytest.mark.rare),
        pytest.param(TORCHRUN, "env", id="2 under torchrun", marks=pytest.mark.slow),
    ],
)
def test_training_comes_to_the_same(command: list[str], how: str, reference: dict[str, Any], tmp_path: Path) -> None:
    report, logged = trained(tmp_path, command, how)
    for name, value in reference.items():
        if isinstance(value, float):
            assert report[name] == pytest.approx(value, rel=1e-4), name
        elif name == "files":
            assert report[name][-1:] == value[-1:] == ["checkpoint_2.pt"]
        elif name == "precision":
            assert report[name] == pytest.approx(value)
        else:
            assert report[name] == value, name
    assert 0.4 < report["accuracy"] < 0.99, "there is something to get wrong"
    assert logged.count("Engine run starting with max_epochs=1") == 2, "one rank logs"
