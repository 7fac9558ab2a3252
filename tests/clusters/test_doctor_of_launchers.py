"""`rankwise doctor` in the ranks of real launchers: one report for all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rankwise._doctor.checks import CHECKS
from tests.clusters.test_env_of_launchers import BIN, run
from tests.lanes import variants

pytestmark = pytest.mark.slow
DOCTOR = [str(BIN / "rankwise"), "doctor"]
# What is so on a machine with few CPUs, where launchers bind ranks to them.
OF_CPUS = {"threads", "affinity"}


def check(command: Sequence[str], size: int, **variables: str) -> None:
    """Check the output of all ranks, which launchers merge."""
    found = json.loads(run([*command, *DOCTOR, "--json"], **variables))
    assert found["world_size"] == size
    bad = [one for one in found["findings"] if one["level"] != "OK" and one["check"] not in OF_CPUS]
    assert bad == []
    assert list(dict.fromkeys(one["check"] for one in found["findings"])) == [*CHECKS, "join"]


@pytest.mark.rare
def test_doctor_under_mpirun(mpirun: tuple[str, ...]) -> None:
    check([*mpirun, "-n", "2"], 2)


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], slow=["openmpi"]), indirect=True)
def test_variables_of_another_run_under_mpirun_are_named(mpirun: tuple[str, ...]) -> None:
    out = run([*mpirun, "-n", "2", *DOCTOR], RANK="0", WORLD_SIZE="1")
    assert "RANK=0 and WORLD_SIZE=1 are set, but" in out


@pytest.mark.rare
def test_doctor_under_torchrun(tmp_path: Path) -> None:
    check([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"], 2, TMPDIR=str(tmp_path))


@pytest.mark.rare
def test_doctor_under_rankwise_launch() -> None:
    check([str(BIN / "rankwise"), "launch", "-n", "2", "--no-prefix", "--no-python"], 2)


def test_doctor_under_srun(cluster: dict[str, str]) -> None:
    check(["srun", "-N1", "-n2"], 2, **cluster)
