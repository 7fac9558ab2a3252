"""Gradients and large reductions of ranks on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import HERE, needs_namespaces, on_two_hosts
from tests.lanes import variants

PROGRAM = str(HERE / "programs" / "gradients.py")

pytestmark = [needs_namespaces, pytest.mark.slow]


@pytest.mark.parametrize("size", variants([4, 3], slow=[3]))
def test_training_is_that_of_one_process(tmp_path: Path, size: int) -> None:
    """With two ranks on each host, and with one on the last."""
    start = 'RANK=$((2 * HOST + LOCAL)) WORLD_SIZE=$0 MASTER_ADDR=left MASTER_PORT=29500 "$PYTHON" "$@" &'
    line = f"for LOCAL in 0 1; do [ $((2 * HOST + LOCAL)) -ge {size} ] || {start.replace('$0', str(size))} done; wait"
    ended = on_two_hosts(tmp_path, line, PROGRAM)
    assert ended.stdout.count("done") == size, ended.stderr
