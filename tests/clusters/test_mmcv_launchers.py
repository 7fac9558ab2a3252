"""mmcv's init_dist under real launchers: torchrun, Open MPI, MPICH, Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.test_launchers import run
from tests.compat.adapted import PROGRAMS
from tests.lanes import variants

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
JOIN = str(PROGRAMS / "join_mmcv.py")


pytestmark = pytest.mark.slow


def check(reports: list[dict[str, Any]], size: int) -> None:
    """Check that ranks have joined each other, and find themselves in the environment."""
    assert [report["rank"] for report in reports] == list(range(size))
    for report in reports:
        assert (report["RANK"], report["WORLD_SIZE"]) == (str(report["rank"]), str(size))
        assert report["ranks"] == list(range(size))
        assert report["total"] == report["size"] == size
        assert int(report["LOCAL_RANK"]) < size
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports}) == 1


@pytest.mark.parametrize("launcher", variants(["pytorch", "auto"], slow=["auto"]))
def test_torchrun(launcher: str) -> None:
    check(run([TORCHRUN, "--standalone", "--nproc-per-node=2", JOIN, launcher]), 2)


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], slow=["openmpi"]), indirect=True)
@pytest.mark.parametrize("launcher", variants(["mpi", "auto"], slow=["mpi"]))
def test_mpirun(mpirun: tuple[str, ...], launcher: str) -> None:
    """The original knows Open MPI alone, and does not join under that either."""
    reports = run([*mpirun, "-n", "3", sys.executable, JOIN, launcher])
    check(reports, 3)
    assert sorted(report["LOCAL_RANK"] for report in reports) == ["0", "1", "2"]


@pytest.mark.parametrize("launcher", variants(["slurm", "auto"], slow=["slurm"]))
def test_srun(cluster: dict[str, str], launcher: str) -> None:
    """On two nodes of different size, where the original's local ranks are wrong."""
    reports = run(
        ["srun", "-N2", "-n3", "--export=ALL,MASTER_ADDR=127.0.0.1", sys.executable, JOIN, launcher], **cluster
    )
    check(reports, 3)
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "1", "0"]


@pytest.mark.rare
def test_srun_with_a_timeout_and_a_port(cluster: dict[str, str]) -> None:
    """The original takes no timeout under Slurm; its ranks may choose a port each."""
    options = '{"port": 23458, "seconds": 40, "backend": "gloo"}'
    reports = run(["srun", "-N1", "-n2", sys.executable, JOIN, "slurm", options], **cluster)
    check(reports, 2)
    assert {report["MASTER_PORT"] for report in reports} == {"23458"}
