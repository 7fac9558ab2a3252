"""`rankwise env --all` in the ranks of real launchers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
SHOW = [str(BIN / "rankwise"), "env", "--all"]


def check(command: Sequence[str], launcher: str, size: int, **variables: str) -> None:
    """Check the two forms of the output of all ranks, which launchers merge."""
    found = json.loads(run([*command, *SHOW, "--json"], **variables))
    assert [one["launcher"] for one in found["ranks"]] == [launcher] * size
    assert [one["facts"]["rank"]["value"] for one in found["ranks"]] == list(range(size))
    assert sorted(one["facts"]["local_rank"]["value"] for one in found["ranks"]) == list(range(size))
    assert found["differs"] == ["rank", "local_rank"]
    lines = run([*command, *SHOW], **variables).splitlines()
    assert lines[0].split() == ["rank", "local_rank"]
    assert [line.split()[0] for line in lines[1 : size + 1]] == [str(rank) for rank in range(size)]


def run(command: Sequence[str], **variables: str) -> str:
    environ = clean_environ(**variables)
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], fast=["openmpi"], slow=[]), indirect=True)
def test_all_under_mpirun(mpirun: tuple[str, ...]) -> None:
    check([*mpirun, "-n", "3"], "mpich" if len(mpirun) == 1 else "openmpi", 3)


@pytest.mark.rare
def test_all_under_torchrun(tmp_path: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"]
    check(command, "torchrun", 2, TMPDIR=str(tmp_path))


@pytest.mark.rare
def test_all_under_rankwise_launch() -> None:
    check([str(BIN / "rankwise"), "launch", "-n", "2", "--no-prefix", "--no-python"], "rankwise", 2)


@pytest.mark.slow
def test_all_under_srun(cluster: dict[str, str]) -> None:
    check(["srun", "-N1", "-n3"], "slurm", 3, **cluster)


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], slow=["openmpi"]), indirect=True)
def test_all_under_mpirun_without_a_rank(mpirun: tuple[str, ...]) -> None:
    """One of the processes does not take part: an error that names it on all others, in bounded time."""
    skip = ["sh", "-c", '[ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ] || exec "$@"', "sh"]
    command = [*mpirun, "-n", "3", *skip, *SHOW, "--timeout", "5"]
    ended = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode != 0
    assert "rank 1 of 3 did not arrive within 5 s; ranks 0, 2 did" in ended.stderr
    assert "Traceback" not in ended.stderr
