"""Large values on two hosts: each goes to each host once, and the other ranks of the host map it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import HERE, needs_namespaces, on_two_hosts

PROGRAM = str(HERE / "programs" / "values.py")

pytestmark = [needs_namespaces, pytest.mark.slow]


@pytest.mark.parametrize("per_host", [2, 3])
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


def test_hosts_without_shared_memory(tmp_path: Path) -> None:
    """One host has it, and the other one has not: the data planes move the values."""
    out = _run(tmp_path, 2, without="1")
    assert out.startswith("all_gather 3 3\n")


def _run(folder: Path, per_host: int, *args: str, without: str = "") -> str:
    """Return the output of the program, with so many ranks on each host, and one host without shared memory."""
    locals_ = " ".join(map(str, range(per_host)))
    start = f"RANK=$(({per_host} * HOST + LOCAL)) WORLD_SIZE={2 * per_host} MASTER_ADDR=left MASTER_PORT=29500"
    off = f'[ "$HOST" != "{without}" ] || export RANKWISE_SHARED_MEMORY=0; ' if without else ""
    ended = on_two_hosts(folder, f'{off}for LOCAL in {locals_}; do {start} "$PYTHON" "$@" & done; wait', PROGRAM, *args)
    assert ended.stdout.count("done") == 2 * per_host, ended.stderr
    return ended.stdout
