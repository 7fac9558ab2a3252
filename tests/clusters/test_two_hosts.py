"""Drop-ins that launch, on two hosts with a network of their own between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.adapted import PROGRAMS, adapted
from tests.session.worlds import PROGRAMS as SESSION_PROGRAMS
from tests.session.worlds import clean_environ

HERE = Path(__file__).parent
SCALE = str(SESSION_PROGRAMS / "scale.py")
NEEDED = ("unshare", "ip", "mount", "hostname")

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
    reason=f"not root, or one of {', '.join(NEEDED)} is missing: network namespaces cannot be made",
)
pytestmark = needs_namespaces


def on_two_hosts(folder: Path, shell: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on two hosts; HOST is 0 on one and 1 on the other."""
    hosts, resolver = folder / "hosts", folder / "resolv.conf"
    hosts.write_text("127.0.0.1 localhost\n10.9.9.1 left\n10.9.9.2 right\n")
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")  # refuses at once
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = ["sh", str(HERE / "two_hosts.sh"), str(hosts), str(resolver)]
    return subprocess.run(
        ["unshare", *spaces, *script, "sh", "-c", shell, "sh", *args],
        env=clean_environ(TMPDIR=str(folder), PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_hosts_are_two(tmp_path: Path) -> None:
    ended = on_two_hosts(
        tmp_path, 'echo "$HOST $(hostname) $(ip -o -4 addr show scope global | grep -o "10[0-9.]*/24")"'
    )
    assert sorted(ended.stdout.splitlines()) == ["0 left 10.9.9.1/24", "1 right 10.9.9.2/24"], ended.stderr


@pytest.mark.slow
def test_virtex_launches_on_two_machines(tmp_path: Path) -> None:
    program = adapted("train_virtex.py", tmp_path)
    options = "--num-machines 2 --num-gpus-per-machine 2 --dist-url tcp://10.9.9.1:23456"
    ended = on_two_hosts(tmp_path, f'exec "$PYTHON" "$1" {options} --machine-rank $HOST', program)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("of 4: rank 1.5, loss ")


@pytest.mark.slow
def test_the_launch_variant_launches_on_two_machines(tmp_path: Path) -> None:
    options = "--no_prefix --nnodes=2 --nproc_per_node=2 --master_addr=left --master_port=29501 --node_rank=$HOST"
    command = f'exec "$PYTHON" -m rankwise.compat.torch_launch {options} --use_env=False "$1"'
    ended = on_two_hosts(tmp_path, command, str(PROGRAMS / "train_launch.sh"))
    assert ended.returncode == 0, ended.stderr
    lines = [f"{rank} of 4: local {rank % 2}, told {rank % 2}, on tiny" for rank in range(4)]
    assert sorted(ended.stdout.splitlines()) == lines


@pytest.mark.slow
def test_a_rank_that_dies_on_one_machine_ends_the_world_on_both(tmp_path: Path) -> None:
    options = "--nnodes=2 --nproc_per_node=2 --master_addr=left --node_rank=$HOST"
    command = f'"$PYTHON" -m rankwise.compat.torch_launch {options} "$1" 3; echo "$HOST ended with $?"'
    ended = on_two_hosts(tmp_path, command, str(PROGRAMS / "die_in_barrier.py"))
    assert "rank 3 of 4 on right was killed by SIGKILL" in ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 ended with 1", "1 ended with 137"], ended.stderr


@pytest.mark.slow
def test_groups_within_and_across_hosts_when_a_rank_is_killed(tmp_path: Path) -> None:
    """Two ranks on each host; the last one is killed, and the ranks of the first host go on in their group."""
    start = 'RANK=$((2 * HOST + LOCAL)) WORLD_SIZE=4 MASTER_ADDR=left MASTER_PORT=29500 "$PYTHON" "$1" two_hosts &'
    ended = on_two_hosts(tmp_path, f"for LOCAL in 0 1; do {start} done; wait", SCALE)
    assert ended.stdout == "named\n" * 3, ended.stderr
