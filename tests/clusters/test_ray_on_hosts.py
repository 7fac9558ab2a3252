"""`launch(on="ray")` in a cluster of Ray on two hosts that are network namespaces."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, needs_namespaces, on_two_hosts

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.rare,
]

PROGRAM = str(Path(__file__).parent / "programs" / "on_engine.py")
# The second host joins when the first one has its cluster; the program runs on the first when both are there. The
# namespace of processes ends with the first host, and Ray's processes with it.
SHELL = """
ray() { "$1/ray" start --node-ip-address="$2" --num-cpus=2 --temp-dir="$4" $3 >"$TMPDIR/ray-$HOST" 2>&1; }
if [ $HOST = 0 ]; then
    ray "$1" 10.9.9.1 "--head --port=6379 --include-dashboard=false" "$3" || { cat "$TMPDIR/ray-0" >&2; exit 1; }
    : > "$TMPDIR/is-there"
    until [ -e "$TMPDIR/has-joined" ]; do sleep 0.1; done
    RAY_ADDRESS=10.9.9.1:6379 "$PYTHON" "$2" ray places; status=$?
    : > "$TMPDIR/ended"
    exit $status
fi
until [ -e "$TMPDIR/is-there" ]; do sleep 0.1; done
ray "$1" 10.9.9.2 --address=10.9.9.1:6379 "$3" || cat "$TMPDIR/ray-1" >&2
: > "$TMPDIR/has-joined"
until [ -e "$TMPDIR/ended" ]; do sleep 0.1; done
"""


def test_ranks_meet_on_the_node_of_rank_zero(tmp_path: Path) -> None:
    # Short: the paths of Ray's sockets have to fit into 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ended = on_two_hosts(tmp_path, SHELL, str(BIN), PROGRAM, folder)
    assert ended.returncode == 0, ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("[["))
    assert json.loads(line) == [[rank, 4, rank // 2, f"10.9.9.{rank // 2 + 1}", 6] for rank in range(4)]
