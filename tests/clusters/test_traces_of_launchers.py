"""Traces of ranks on two hosts, and under real launchers: one run for all ranks, which names the late one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rankwise._trace.reading import read_run
from tests.clusters.hosts import needs_namespaces, on_two_hosts
from tests.clusters.test_env_of_launchers import BIN, run
from tests.lanes import variants

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "trace" / "programs" / "late.py"
STEPS = 20


def check(folder: Path, size: int, late: int) -> None:
    """Check the traces of a run in which a rank was late by 50 ms in each step."""
    found = read_run(folder)
    assert found.problems == []
    assert [record.world_size for record in found.records] == [size] * size
    waits = [wait for wait in found.waits if wait.call.text.startswith("all_reduce at late.py:")]
    assert len(waits) == STEPS - 1
    assert [wait.rank for wait in waits].count(late) > 0.9 * len(waits)


@needs_namespaces
@pytest.mark.parametrize("ranks_here", variants([2, 3], slow=[2]))
def test_two_hosts(ranks_here: int, tmp_path: Path) -> None:
    size = 2 * ranks_here
    late = size - 1
    place = f"RANK=$(({ranks_here} * HOST + LOCAL)) LOCAL_RANK=$LOCAL WORLD_SIZE={size}"
    rank = f'{place} MASTER_ADDR=10.9.9.1 MASTER_PORT=29500 "$PYTHON" {PROGRAM} {late} 0.05 {STEPS} end'
    shell = f'pids=; for LOCAL in $(seq 0 {ranks_here - 1}); do {rank} & pids="$pids $!"; done; wait $pids'
    ended = on_two_hosts(tmp_path, shell, RANKWISE_TRACE=str(tmp_path / "traces"))
    assert f"rank {late}: " in ended.stdout, ended.stdout + ended.stderr
    assert "rank 0: " not in ended.stdout
    check(tmp_path / "traces", size, late)


def under(launcher: Sequence[str], folder: Path, **variables: str) -> None:
    run([*launcher, str(PROGRAM), "1", "0.05", str(STEPS), "end"], RANKWISE_TRACE=str(folder), **variables)
    check(folder, 2, 1)


@pytest.mark.rare
def test_mpirun(mpirun: tuple[str, ...], tmp_path: Path) -> None:
    under([*mpirun, "-n", "2", str(BIN / "python")], tmp_path)


@pytest.mark.rare
def test_torchrun(tmp_path: Path) -> None:
    under([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"], tmp_path / "traces", TMPDIR=str(tmp_path))


@pytest.mark.rare
def test_srun(cluster: dict[str, str], tmp_path: Path) -> None:
    under(["srun", "-N1", "-n2", str(BIN / "python")], tmp_path, **cluster)
