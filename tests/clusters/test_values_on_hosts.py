"""Large values on two hosts: each goes to each host once, and the other ranks of the host map it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import HERE, needs_namespaces, on_two_hosts
from tests.lanes import variants

PROGRAM = str(HERE / "programs" / "values.py")

pytestmark = [needs_namespaces, pytest.mark.slow]


@pytest.mark.parametrize("per_host", variants([2, 3], slow=[]))
def test_a_value_is_sent_once_to_each_host(tmp_path: Path, per_host: int) -> None:
    out = _run(tmp_path, per_host, "with-errors")
    # The values that each host sends: all of its own, or those that are not at their destination.
    assert out.splitlines()[:5] == [
        f"all_gather {per_host} {per_host}",
        f"all_gather again {per_host} {per_host}",
        "broadcast 0 1",
        f"gather 0 {per_host}",
        "one rank 1 0",
    ]


def test_a_host_with_one_rank(tmp_path: Path) -> None:
    """It receives values into memory of its own, and sends its own one from there."""
    out = _run(tmp_path, 2, size=3)
    assert out.splitlines()[:5] == [
        "all_gather 2 1",
        "all_gather again 2 1",
        "broadcast 0 1",
        "gather 0 1",
        "one rank 1 0",
    ]


def test_hosts_without_shared_memory(tmp_path: Path) -> None:
    """One host has it, and the other one has not: the data planes move the values."""
    out = _run(tmp_path, 2, without="1")
    assert out.startswith("all_gather 3 3\n")


def _run(folder: Path, per_host: int, *args: str, size: int | None = None, without: str = "") -> str:
    """Return the output of the program.

    Args:
        folder: A folder.
        per_host: The number of ranks on each host.
        args: Arguments of the program.
        size: The number of ranks; the last host has less than others then.
        without: A host without shared memory.
    """
    size = size or 2 * per_host
    rank = f"$(({per_host} * HOST + LOCAL))"
    start = f"RANK={rank} WORLD_SIZE={size} MASTER_ADDR=left MASTER_PORT=29500"
    off = f'[ "$HOST" != "{without}" ] || export RANKWISE_SHARED_MEMORY=0; ' if without else ""
    run = f'[ {rank} -ge {size} ] || {start} "$PYTHON" "$@" &'
    ended = on_two_hosts(
        folder, f"{off}for LOCAL in {' '.join(map(str, range(per_host)))}; do {run} done; wait", PROGRAM, *args
    )
    assert ended.stdout.count("done") == size, ended.stderr
    return ended.stdout
