"""Drop-ins that launch, on two hosts with a network of their own between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import HERE, PLACED, check_places, needs_namespaces, on_two_hosts, places
from tests.compat.adapted import PROGRAMS, adapted
from tests.lanes import variants
from tests.session.worlds import PROGRAMS as SESSION_PROGRAMS

SCALE = str(SESSION_PROGRAMS / "scale.py")

NO_NAMES = "127.0.0.1 localhost\n"
OF_LOOPBACK = f"{NO_NAMES}127.0.1.1 left right\n"

pytestmark = needs_namespaces


def test_the_hosts_are_two(tmp_path: Path) -> None:
    ended = on_two_hosts(
        tmp_path, 'echo "$HOST $(hostname) $(ip -o -4 addr show scope global | grep -o "10[0-9.]*/24")"'
    )
    assert sorted(ended.stdout.splitlines()) == ["0 left 10.9.9.1/24", "1 right 10.9.9.2/24"], ended.stderr


@pytest.mark.parametrize(
    "names", variants([NO_NAMES, OF_LOOPBACK], slow=[OF_LOOPBACK]), ids=["no names", "names of loopback"]
)
def test_hosts_whose_names_cannot_be_used(tmp_path: Path, names: str) -> None:
    """Debian gives each host an address of loopback, where gloo would listen: only MASTER_ADDR need be right."""
    start = 'RANK=$((2 * HOST + LOCAL)) WORLD_SIZE=4 MASTER_ADDR=10.9.9.1 MASTER_PORT=29500 "$PYTHON" "$1" &'
    ended = on_two_hosts(tmp_path, f"for LOCAL in 0 1; do {start} done; wait", PLACED, names=names)
    check_places(places(ended), ["left", "left", "right", "right"])


@pytest.mark.rare
def test_virtex_launches_on_two_machines(tmp_path: Path) -> None:
    program = adapted("train_virtex.py", tmp_path)
    options = "--num-machines 2 --num-gpus-per-machine 2 --dist-url tcp://10.9.9.1:23456"
    ended = on_two_hosts(tmp_path, f'exec "$PYTHON" "$1" {options} --machine-rank $HOST', program)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("of 4: rank 1.5, loss ")


@pytest.mark.rare
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
    # Ranks that print at once may write the ends of their lines after each other.
    assert ended.stdout.replace("\n", "") == "named" * 3, ended.stderr


@pytest.mark.parametrize(
    "names", variants([NO_NAMES, OF_LOOPBACK], slow=[NO_NAMES]), ids=["no names", "names of loopback"]
)
def test_groups_of_torch_on_hosts_whose_names_cannot_be_used(tmp_path: Path, names: str) -> None:
    """Those that the program makes itself too: DDP, FSDP and device meshes make some."""
    start = 'RANK=$((2 * HOST + LOCAL)) WORLD_SIZE=4 MASTER_ADDR=10.9.9.1 MASTER_PORT=29500 "$PYTHON" "$1" &'
    program = str(HERE / "programs" / "torch_groups.py")
    ended = on_two_hosts(tmp_path, f"for LOCAL in 0 1; do {start} done; wait", program, names=names)
    assert sorted(ended.stdout.splitlines()) == [f'{{"rank": {rank}, "totals": [4, 4, 4]}}' for rank in range(4)], (
        ended.stderr
    )
