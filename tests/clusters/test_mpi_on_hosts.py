"""Every MPI that can be had, on one host and on two: ranks that are uneven, and dealt out in turn."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clusters.hosts import PLACED, SHOW, check_places, check_reports, from_left, needs_namespaces, places
from tests.clusters.mpi import MPIS, Mpi
from tests.lanes import variants
from tests.session.worlds import clean_environ

pytestmark = pytest.mark.slow

every_mpi = pytest.mark.parametrize("mpi", variants(MPIS, slow={"mpich-5"}), indirect=True)
# Those whose library mpi4py can load by its name.
WITH_MPI4PY = ["openmpi-5", "mpich-5", "openmpi-4", "intel"]
with_mpi4py = pytest.mark.parametrize("mpi", variants(WITH_MPI4PY, slow={"openmpi-5"}), indirect=True)
one_of_each = pytest.mark.parametrize("mpi", variants(["openmpi-5", "mpich-5"], slow={"openmpi-5"}), indirect=True)


def through_mpi4py(mpi: Mpi) -> list[str]:
    """Return the options by which mpi4py finds the library of this MPI, of several that are installed."""
    return [*mpi.sets("MPI4PY_LIBMPI", mpi.library)]


@pytest.mark.parametrize("mpi", variants(MPIS, slow={"intel"}), indirect=True)
def test_on_one_host(mpi: Mpi) -> None:
    command = [*mpi.command, *mpi.crowded, "-n", "3", *SHOW]
    ended = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    check_reports(ended.stdout, mpi.name, [host] * 3)


@needs_namespaces
@every_mpi
@pytest.mark.parametrize("interleaved", variants([False, True], slow=[True]), ids=["blocks", "interleaved"])
def test_on_two_hosts_with_an_address(mpi: Mpi, tmp_path: Path, interleaved: bool) -> None:
    address = [*mpi.sets("MASTER_ADDR", "left"), *mpi.sets("MASTER_PORT", "29500")]
    start = mpi.in_turn() if interleaved else mpi.on_two(2, 1)
    ended = from_left(tmp_path, [*start, *address, *SHOW])
    assert ended.returncode == 0, ended.stderr
    check_reports(ended.stdout, mpi.name, ["left", "right", "left"] if interleaved else ["left", "left", "right"])


@needs_namespaces
@with_mpi4py
@pytest.mark.parametrize("interleaved", variants([False, True], slow=[True]), ids=["blocks", "interleaved"])
def test_on_two_hosts_through_mpi4py(mpi: Mpi, tmp_path: Path, interleaved: bool) -> None:
    pytest.importorskip("mpi4py")
    start = mpi.in_turn() if interleaved else mpi.on_two(2, 1)
    ended = from_left(tmp_path, [*start, *through_mpi4py(mpi), *SHOW])
    assert ended.returncode == 0, ended.stderr
    check_reports(ended.stdout, mpi.name, ["left", "right", "left"] if interleaved else ["left", "left", "right"])


@needs_namespaces
@one_of_each
@pytest.mark.parametrize("early", variants([False, True], slow=[True]), ids=["before", "after"])
def test_groups_of_nodes_where_the_program_uses_mpi_or_not(mpi: Mpi, tmp_path: Path, early: bool) -> None:
    """MPI is not initialised in a program that has not done so; in one that has, it goes on to work."""
    pytest.importorskip("mpi4py")
    ended = from_left(
        tmp_path, [*mpi.in_turn(), *through_mpi4py(mpi), mpi.python, PLACED, *(["early"] if early else [])]
    )
    found = places(ended)
    check_places(found, ["left", "right", "left"])
    assert [place["uses_mpi"] for place in found] == [early] * 3


@needs_namespaces
@one_of_each
def test_without_mpi4py_the_error_has_the_option_to_add(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'mpi4py' else find(name, *rest)\n"
    )
    hidden = mpi.sets("PYTHONPATH", str(tmp_path / "none"))
    ended = from_left(tmp_path, [*mpi.on_two(1, 1), *hidden, mpi.python, PLACED])
    assert ended.returncode != 0
    missing = "MASTER_ADDR and MASTER_PORT are not set" if mpi.is_hydra else "MASTER_ADDR is not set"
    option = "-genv MASTER_ADDR HOST -genv MASTER_PORT PORT" if mpi.is_hydra else "-x MASTER_ADDR=HOST"
    assert missing in ended.stderr
    assert f"add `{option}` to mpi" in ended.stderr


@needs_namespaces
@pytest.mark.parametrize("mpi", ["mpich-5"], indirect=True)
def test_an_mpi4py_of_another_mpi_is_named(mpi: Mpi, tmp_path: Path) -> None:
    """In each rank it is a world of one, without an error of its own."""
    pytest.importorskip("mpi4py")
    start = [*mpi.on_two(1, 1), *mpi.sets("MPI4PY_LIBMPI", MPIS["openmpi-5"]().library)]
    ended = from_left(tmp_path, [*start, mpi.python, PLACED])
    assert ended.returncode != 0
    for rank in range(2):
        found = f"mpi4py has rank 0 of 1 in MPI.COMM_WORLD, but the launcher started rank {rank} of 2: it uses Open MPI"
        assert found in ended.stderr
    assert "add `-genv MASTER_ADDR HOST -genv MASTER_PORT PORT` to mpiexec" in ended.stderr


@needs_namespaces
@pytest.mark.parametrize("mpi", ["mpich-5"], indirect=True)
def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(mpi: Mpi, tmp_path: Path) -> None:
    """Nothing else would: MPI_Init waits for all ranks, and no signal of Python interrupts it."""
    pytest.importorskip("mpi4py")
    skip = ["sh", "-c", '[ "$PMI_RANK" = 2 ] || exec "$@"', "sh"]
    start = [*mpi.on_two(2, 1), *through_mpi4py(mpi), *mpi.sets("JOIN_SECONDS", "5")]
    ended = from_left(tmp_path, [*start, *skip, mpi.python, PLACED])
    assert ended.returncode != 0
    for rank in range(2):
        assert f"rank {rank} (from PMI_RANK) of 3 (from PMI_SIZE) waited 5 s in MPI_Init" in ended.stderr
