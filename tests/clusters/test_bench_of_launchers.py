"""`rankwise bench` in the ranks of real launchers: rank zero alone prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clusters.test_env_of_launchers import BIN, run

pytestmark = pytest.mark.slow
BENCH = [str(BIN / "rankwise"), "bench", "all_reduce", "--maxbytes", "4", "--seconds", "0", "--timeout", "100"]


def check(command: Sequence[str], **variables: str) -> None:
    """Check the output of two ranks, which launchers merge."""
    first, _, *rows = run([*command, *BENCH], **variables).splitlines()
    assert first.startswith("# ranks: 2, hosts: 1, from ")
    assert [row.split()[5] for row in rows] == ["rankwise", "gloo"]


@pytest.mark.rare
def test_bench_under_mpirun(mpirun: tuple[str, ...]) -> None:
    check([*mpirun, "-n", "2"])


@pytest.mark.rare
def test_bench_under_torchrun(tmp_path: Path) -> None:
    check([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"], TMPDIR=str(tmp_path))


@pytest.mark.rare
def test_bench_under_rankwise_launch() -> None:
    check([str(BIN / "rankwise"), "launch", "-n", "2", "--no-prefix", "--no-python"])


@pytest.mark.rare
def test_bench_under_srun(cluster: dict[str, str]) -> None:
    check(["srun", "-N1", "-n2"], **cluster)
