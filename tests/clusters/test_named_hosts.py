"""Ranks that are missed in a world of two hosts are named with the host that they are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import needs_namespaces, on_two_hosts

pytestmark = [needs_namespaces, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "missed.py"


def test_ranks_are_named_with_their_hosts(tmp_path: Path) -> None:
    ended = on_two_hosts(tmp_path, 'exec "$PYTHON" "$1" "$2"', str(PROGRAM), str(tmp_path / "told"))
    assert ended.returncode == 0, ended.stderr
    absent, late, gone = ended.stdout.splitlines()
    assert absent.startswith("rank 2 of 3 did not arrive within 3 s; rank 0 on left; rank 1 on right did.")
    assert late.startswith("barrier 'epoch end' at missed.py:")
    assert "not all ranks came within 0.5 s. Missing: rank 1 on right, last seen in all_reduce at missed.py:" in late
    assert gone.startswith("broadcast at missed.py:")
    assert "rank 1 on right is gone: its connection closed" in gone
