"""Torchrun on two hosts, and the example of training on both, under it and under MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, PLACED, check_places, from_left, needs_namespaces, on_two_hosts, places
from tests.clusters.mpi import Mpi
from tests.lanes import variants

pytestmark = [needs_namespaces, pytest.mark.slow]

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=left:29400"
STATIC = "--nnodes=2 --master-addr=left --master-port=29400 --node-rank=$HOST"


def check_trained(out: str) -> None:
    """Check the table of the example: on two ranks, each test sample once, most of them right."""
    row = [cell.strip() for cell in next(line for line in out.splitlines() if " 400 " in line).split("│")]
    assert (row[1], row[4]) == ("2", "400")
    assert int(row[5]) > 350


@pytest.mark.parametrize("options", variants([C10D, STATIC], slow=[C10D]), ids=["c10d", "static"])
def test_topology(tmp_path: Path, options: str) -> None:
    command = f'exec "{BIN}/torchrun" {options} --nproc-per-node=2 "$1"'
    found = places(on_two_hosts(tmp_path, command, PLACED))
    hosts = [place["host"] for place in found]
    assert sorted(hosts) == ["left", "left", "right", "right"]
    check_places(found, hosts)


@pytest.mark.rare
def test_the_example_trains(tmp_path: Path) -> None:
    ended = on_two_hosts(tmp_path, f'exec "{BIN}/torchrun" {C10D} --nproc-per-node=1 "$1" --epochs 2', DIGITS)
    assert ended.returncode == 0, ended.stderr
    check_trained(ended.stdout)


@pytest.mark.rare
@pytest.mark.parametrize("mpi", ["openmpi-5", "mpich-5"], indirect=True)
def test_the_example_trains_under_mpi(mpi: Mpi, tmp_path: Path) -> None:
    address = [*mpi.sets("MASTER_ADDR", "left"), *mpi.sets("MASTER_PORT", "29500")]
    ended = from_left(tmp_path, [*mpi.on_two(1, 1), *address, mpi.python, DIGITS, "--epochs", "2"])
    assert ended.returncode == 0, ended.stderr
    check_trained(ended.stdout)
