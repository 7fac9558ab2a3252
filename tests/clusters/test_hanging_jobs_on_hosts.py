"""The rank that a job waits for: under a real Slurm, and on two hosts, each of which sees its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import needs_namespaces, on_two_hosts
from tests.diagnose.jobs import PROGRAM, Injection, hanging, named, place, watch

# Two ranks on one host and three on the other, each in its own process namespace; the last one does not come. The hosts
# end when both have looked.
TWO_HOSTS = """
exec unshare --pid --fork --kill-child --mount-proc sh -c '
export WORLD_SIZE=5 MASTER_ADDR=left MASTER_PORT=29500
for LOCAL in $(seq 0 $((HOST + 1))); do
    RANK=$((2 * HOST + LOCAL)) "$PYTHON" "$0" 4 "$1" > "$2/$HOST.$LOCAL" 2>&1 &
done
until [ $(cat "$2/$HOST".? | grep -o training | wc -l) = $((HOST + 2)) ]; do sleep 0.1; done
"$PYTHON" -m rankwise stacks --watch 6 --interval 0.3 > "$2/$HOST.verdict" 2>&1
: > "$2/$HOST.seen"
until [ -e "$2/0.seen" ] && [ -e "$2/1.seen" ]; do sleep 0.1; done
' "$@"
"""


@pytest.mark.rare
def test_a_task_of_slurm_that_does_not_come_is_named(cluster: dict[str, str]) -> None:
    injection = Injection(launcher="srun", victim=2, how="loader", workers=1, start="forkserver")
    with hanging(injection, **cluster) as pid:
        output = watch(pid)
    assert named(output) == [2]
    assert "rank 2, worker " in output
    assert place("loader") in output


@needs_namespaces
@pytest.mark.soak(20)
@pytest.mark.slow
def test_each_of_two_hosts_shows_its_ranks(tmp_path: Path, seed: int) -> None:
    how = ("lock", "loader", "stopped", "skips")[seed % 4]
    ended = on_two_hosts(tmp_path, TWO_HOSTS, str(PROGRAM), how, str(tmp_path), OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    left, right = ((tmp_path / f"{host}.verdict").read_text() for host in (0, 1))
    assert named(right) == [4], right
    assert place(how) in right
    assert "ranks 0-1: not on this host: on another one, or ended" in right
    assert named(left) == [], left
    assert "no rank moves, and all ranks here are in backward at train_ddp.py:" in left
    assert "ranks 2-4: not on this host: on another one, or ended" in left
