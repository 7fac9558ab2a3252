"""The report of a hang of ranks on two hosts: one for both, on the first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, needs_namespaces, on_two_hosts
from tests.lanes import variants

pytestmark = [needs_namespaces, pytest.mark.slow]

PROGRAM = str(Path(__file__).parents[1] / "diagnose" / "programs" / "hangs.py")
HOSTS = "--nnodes 2 --node-rank $HOST --master-addr left"
LAUNCH = f"{BIN / 'rankwise'} launch {HOSTS} -n 2 --no-prefix --hang-dir $1/reports"
TORCHRUN = f"env RANKWISE_HANG_DIR=$1/reports {BIN / 'torchrun'} {HOSTS} --nproc-per-node 2"
ONE_EACH = TORCHRUN.replace("node 2", "node 1")
# Each host has processes of its own, as hosts have.
PROCESSES = "exec unshare --mount --pid --fork --kill-child --mount-proc sh -c"
UNTIL_REPORTED = 'until grep -qs "this report is in" "$1"/$HOST.err; do sleep 0.2; done; : > "$1/$HOST.done"'
UNTIL_WATCHED = 'until pgrep -f "[_]diagnose.watcher" > /dev/null; do sleep 0.1; done'
# The process opens no listening socket.
LISTENS = 'ss -Hltnp | grep -q "pid=$(pgrep -f "[_]diagnose.watcher")," && echo listens'


def reports(folder: Path, launcher: str, arguments: str, *, before: str = "", both: bool = False) -> list[str]:
    """Return the standard error of each host, when the first one or `both` have reported.

    Args:
        folder: For files.
        launcher: The command line of the launcher; HOST is the number of the host.
        arguments: Those of the program, in shell.
        before: What each host does after the job was started.
        both: Both hosts report.
    """
    done = 'until [ -e "$1/0.done" ]; do sleep 0.2; done'
    wait = UNTIL_REPORTED if both else f"if [ $HOST = 0 ]; then {UNTIL_REPORTED}; else {done}; fi"
    job = f'{launcher} {PROGRAM} {arguments} 2> "$1/$HOST.err" & {before} {wait}; {LISTENS}; kill -9 %1'
    ended = on_two_hosts(folder, f"{PROCESSES} '{job}' sh $1", str(folder))
    assert (folder / "0.done").exists(), ended.stderr
    assert "listens" not in ended.stdout
    return [(folder / f"{host}.err").read_text() for host in (0, 1)]


CASES = [
    (LAUNCH, "rank 0 on left", "lock", "ddp", "rank 1 on left; ranks 2-3 on right"),
    (TORCHRUN, "rank 2 on right", "stopped", "torch", "ranks 0-1 on left; rank 3 on right"),
    (ONE_EACH, "rank 1 on right", "skips", "adopted", "rank 0 on left"),
]


@pytest.mark.parametrize(
    ("launcher", "missing", "how", "collective", "waiting"),
    variants(CASES, slow=CASES[:1]),
    ids=["rankwise", "torchrun", "one rank each"],
)
def test_one_report_for_two_hosts(
    tmp_path: Path, launcher: str, missing: str, how: str, collective: str, waiting: str
) -> None:
    text, other = reports(tmp_path, launcher, f"{missing.split()[1]} {how} {collective} 3")
    assert text.count("hang report of left, right:") == 1, text
    assert "hang report" not in other
    assert f"missing: {missing}, not moving" in text
    assert f"{waiting}: waiting for " in text
    (file,) = (tmp_path / "reports").iterdir()
    assert re.fullmatch(r"hang-left-rank0-\d+T\d+-[0-9a-f]{8}\.txt", file.name)
    for line in file.read_text().splitlines():
        assert line in text


def test_hosts_that_are_cut_off_report_each_for_itself(tmp_path: Path) -> None:
    cut = f"{UNTIL_WATCHED}; if [ $HOST = 1 ]; then ip link set right0 down; fi;"
    left, right = reports(tmp_path, TORCHRUN, "3 stopped torch 4", before=cut, both=True)
    assert "hang report of left (2 of 4 ranks):" in left
    assert "no answer from right (ranks 2-3): its processes are stopped, or the host or the network" in left
    assert "hang report of right (2 of 4 ranks):" in right
    assert "no answer from left (ranks 0-1): its processes are stopped, or the host or the network" in right


@pytest.mark.rare
def test_a_host_without_a_watch_is_named(tmp_path: Path) -> None:
    text, _ = reports(tmp_path, TORCHRUN, "3 stopped torch $((4 - 4 * HOST))")
    assert "no answer from right (ranks 2-3): no process watches it: RANKWISE_HANG_SECONDS is not set there" in text
