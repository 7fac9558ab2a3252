"""The commands of docs/launchers.md run as they are written, where their launchers are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN
from tests.clusters.mpi import MPIS
from tests.lanes import variants
from tests.session.worlds import clean_environ

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```bash\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
# Sections whose launchers are installed with the tests. Slurm starts its own in test_slurm_nodes.py.
INSTALLED = ("rankwise launch", "torchrun", "Open MPI", "MPICH", "Accelerate")
ON_OTHER_HOSTS = re.compile(r"gpu-01|-N2")


def commands(section: str) -> list[str]:
    return [line.partition("   #")[0] for line in BLOCKS[section].splitlines()]


def run(command: str, folder: Path, **variables: str) -> str:
    """Run a command in a folder with the script, where `mpirun` and `mpiexec` are those of Open MPI and MPICH."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, mpi in (("mpirun", MPIS["openmpi-5"]()), ("mpiexec", MPIS["mpich-5"]())):
        words = " ".join([*mpi.command, *mpi.crowded])
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(
        "import rankwise as rw\n"
        "with rw.init(timeout=100):\n"
        "    ranks = rw.all_gather(rw.get_rank())\n"
        "    if rw.is_rank_zero():\n"
        "        print('trained on', ranks)\n"
    )
    path = f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    environ = clean_environ(PATH=path, TMPDIR=str(folder), **variables)
    ended = subprocess.run(
        ["sh", "-c", command], env=environ, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_block_has_a_command_that_starts_the_script() -> None:
    assert len(BLOCKS) > 10
    for section in BLOCKS:
        assert "train.py" in commands(section)[0]
        assert all(re.search(r"train\.py$|rankwise env --all$", command) for command in commands(section)), section


@pytest.mark.parametrize("section", variants(INSTALLED, slow=()))
def test_on_one_host(section: str, tmp_path: Path) -> None:
    if section == "Accelerate" and shutil.which("accelerate", path=str(BIN)) is None:
        pytest.skip("accelerate is not installed")
    local = [command for command in commands(section) if not ON_OTHER_HOSTS.search(command)]
    assert len(local) >= 2
    for command in local:
        output = run(command, tmp_path)
        if command.endswith("--all"):
            assert "all else is the same on the 2 ranks" in output
        else:
            assert f"trained on {list(range(8 if '-n 8' in command else 2))}" in output


@pytest.mark.rare
def test_under_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    (local,) = (command for command in commands("Slurm") if not ON_OTHER_HOSTS.search(command))
    assert "trained on [0, 1]" in run(local, tmp_path, **cluster)
    (shown,) = (command for command in commands("Slurm") if command.endswith("--all"))
    few = shown.replace("--ntasks-per-node=8", "--ntasks-per-node=2")
    assert "all else is the same on the 4 ranks" in run(few, tmp_path, MASTER_ADDR="127.0.0.1", **cluster)
