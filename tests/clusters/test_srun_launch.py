"""`rankwise launch --srun` in an allocation of a real Slurm."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.clusters.hosts import BIN, HERE
from tests.lanes import variants
from tests.session.worlds import clean_environ

pytestmark = pytest.mark.slow

# The nodes are on one machine, and their names do not resolve.
LAUNCH = f"{BIN / 'rankwise'} launch --srun --master-addr 127.0.0.1"
WHERE = """--no-python sh -c 'echo "$RANK of $WORLD_SIZE on $SLURMD_NODENAME"'"""


def in_allocation(cluster: Mapping[str, str], nodes: str, shell: str) -> subprocess.CompletedProcess[str]:
    command = ["salloc", "-Q", *nodes.split(), "sh", "-c", shell]
    environ = clean_environ(**cluster)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


def test_each_node_has_its_ranks_in_the_order_of_the_job(cluster: dict[str, str]) -> None:
    ended = in_allocation(cluster, "-N3 --ntasks-per-node=2", f"{LAUNCH} --nnodes 2 -n 2 --no-prefix {WHERE}")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} of 4 on node{rank // 2}" for rank in range(4)]


def test_a_failure_ends_all_nodes_and_a_step_has_no_steps(cluster: dict[str, str]) -> None:
    fails = "--no-python sh -c '[ \"$RANK\" = 1 ] && exit 7; exec sleep 1000'"
    no_steps = '! squeue -h -s -o %i | grep -q "[.][0-9]"'  # Slurm forgets a step some time after its end
    shell = f"{LAUNCH} -n 1 {fails}; echo \"ended with $?\"; timeout 100 sh -c 'until {no_steps}; do sleep 0.1; done'; "
    shell += 'echo "steps: $?"; '
    ended = in_allocation(cluster, "-N2", shell + f'srun -N1 -n1 --overlap {LAUNCH} true; echo "ended with $?"')
    assert ended.stdout.splitlines() == ["ended with 7", "steps: 0", "ended with 2"], ended.stderr
    assert "rank 1 of 2 on " in ended.stderr
    assert "--srun starts steps from the shell of a job, and this process is a task of one" in ended.stderr


SAVES = HERE / "programs" / "saves.py"
STARTED = 'until [ $(ls "$TMPDIR" | grep -c started) = 4 ]; do sleep 0.1; done; '
STEP = 'scancel $(squeue -h -s -j $SLURM_JOB_ID -o %i | grep "[.][0-9]" | head -n 1)'
COMPLETING = ["sinfo", "--noheader", "--Node", "--states=completing", "--format=%N"]
# How; the exit status of the launcher; how many ranks have saved something; the message.
HOWS = {
    "scancel of the job": (
        "scancel $SLURM_JOB_ID",
        1,
        4,
        "was stopped by SIGTERM, and not from this terminal: Slurm sends",
    ),
    "scancel of a step": (STEP, 1, 2, r"host node\d is lost: Slurm has ended its step: STEP .*CANCELLED"),
    "SIGKILL to srun": ("pkill -9 -n -x -P $launcher srun", 1, 2, r"host node\d is lost: .*srun was killed by SIGKILL"),
    "SIGKILL to the launcher": ("kill -9 $launcher", 137, 0, ""),
    "SIGINT to the launcher": ("kill -INT $launcher", 130, 0, ""),
}


@pytest.mark.parametrize("how", variants(HOWS, slow={"scancel of a step", "SIGKILL to the launcher"}))
def test_the_end_of_a_part_is_the_end_of_all(cluster: dict[str, str], tmp_path: Path, how: str) -> None:
    """Nothing is left on any node. What ranks do at SIGTERM they do to the end, if Slurm lets them."""
    stop, status, saved, message = HOWS[how]
    shell = f'({STARTED} launcher=$(cat "$TMPDIR/pid"); {stop}) & '
    shell += f'sh -c \'echo $$ > "$TMPDIR/pid"; exec {LAUNCH} -n 2 {SAVES}\'; echo "ended with $?"'
    began = time.monotonic()
    ended = in_allocation({**cluster, "TMPDIR": str(tmp_path)}, "-N2", shell)
    assert f"ended with {status}\n" in ended.stdout, ended.stderr
    assert re.search(message, ended.stderr), ended.stderr
    assert len(list(tmp_path.glob("saved-*"))) == saved
    while left := [each for each in psutil.process_iter(["cmdline"]) if str(SAVES) in (each.info["cmdline"] or ())]:
        assert time.monotonic() < began + 150, left
        time.sleep(0.1)
    # Other tests expect all nodes to be free.
    while subprocess.run(COMPLETING, env=clean_environ(**cluster), capture_output=True, check=True).stdout:
        assert time.monotonic() < began + 150
        time.sleep(0.1)
