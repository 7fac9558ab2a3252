"""The command line of `rankwise submit`; tests/clusters submits to a real Slurm."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from rankwise.cli.main import main


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "submitted"),
    [
        ("train.py --nnodes 2 --nproc-per-node 4", "8 ranks of train.py"),
        ("--nnodes=2 train.py -n 4 --lr 0.1 x", "8 ranks of train.py --lr 0.1 x"),
        ("train.py -n 4 -- --nnodes 2 -n 3", "4 ranks of train.py --nnodes 2 -n 3"),
        ("-m timeit -n 2 -s pass", "2 ranks of timeit -s pass"),
    ],
)
def test_options_may_stand_before_and_after_the_script(line: str, submitted: str) -> None:
    ended = CliRunner().invoke(main, ["submit", "--dry-run", *line.split()])
    assert ended.exit_code == 0, ended.output
    assert ended.stderr == f"{submitted}: not submitted\n"
    ranks = submitted.split(maxsplit=1)[0]
    nodes = 2 if ranks == "8" else 1
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={int(ranks) // nodes}\n" in ended.stdout


@pytest.mark.parametrize("line", ["--nnode 2 train.py", "--time x train.py", "train.py --nnodes 0", "", "no.py"])
def test_misuse_is_an_error(line: str) -> None:
    ended = CliRunner().invoke(main, ["submit", "--dry-run", *line.split()])
    assert ended.exit_code == 2, ended.output
    assert not ended.stdout


def test_without_submitit_a_dry_run_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "submitit" else find(name))
    ended = CliRunner().invoke(main, ["submit", "--dry-run", "train.py"])
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "needs the package 'submitit'" in ended.stderr
    assert "pip install submitit" in ended.stderr
    manifest = CliRunner().invoke(main, ["submit", "--k8s", "--dry-run", "--image", "registry/train:1", "train.py"])
    assert manifest.exit_code == 0, manifest.output
