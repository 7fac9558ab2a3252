"""Hosts that know each other by a secret, one that has another, and strangers that reach the ports of a job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, HERE, PLACED, check_places, needs_namespaces, on_two_hosts, places
from tests.lanes import variants

pytestmark = [needs_namespaces, pytest.mark.slow]

TEXT = "0123456789abcdef0123456789abcdef"
ALONE = f"{BIN / 'rankwise'} launch -n 2 --no-prefix "
LAUNCH = f"{ALONE} --nnodes 2 "
STATIC = "--node-rank $HOST --master-addr left --rdzv-conf timeout=60 "
C10D = "--rdzv-backend c10d --rdzv-endpoint left:29400 "
CROWD = HERE / "programs" / "crowd.py"
STRANGER = str(HERE / "programs" / "stranger.py")


@pytest.mark.parametrize("options", variants([STATIC, C10D], slow=[C10D]), ids=["static", "c10d"])
def test_hosts_with_a_secret_are_one_world(tmp_path: Path, options: str) -> None:
    ended = on_two_hosts(tmp_path, f'exec {LAUNCH} {options} "$1"', PLACED, RANKWISE_SECRET=TEXT)
    found = places(ended)
    first = found[0]["host"]  # c10d chooses
    check_places(found, [first, first, *(["right", "right"] if first == "left" else ["left", "left"])])
    assert "RANKWISE_SECRET" not in ended.stderr


@pytest.mark.parametrize("start", variants(["launch", "plain"], slow=["launch"]))
def test_a_host_with_another_secret_is_an_error_on_both(tmp_path: Path, start: str) -> None:
    command = f'{LAUNCH} {STATIC} "$1"'
    if start == "plain":
        command = 'RANK=$HOST WORLD_SIZE=2 MASTER_ADDR=left MASTER_PORT=29500 "$PYTHON" "$2" 5'
    shell = f'if [ $HOST = 1 ]; then RANKWISE_SECRET={TEXT[::-1]}; fi; {command}; echo "$HOST: $?"'
    ended = on_two_hosts(tmp_path, shell, PLACED, str(HERE / "programs" / "join.py"), RANKWISE_SECRET=TEXT)
    assert sorted(ended.stdout.split("\n"))[1:] == ["0: 1", "1: 1"], ended.stderr
    assert "RANKWISE_SECRET" in ended.stderr
    assert TEXT not in ended.stderr
    assert TEXT[::-1] not in ended.stderr


@pytest.mark.parametrize("attack", variants(["write", "offer", "connect"], slow=["write", "offer"]))
def test_another_user_of_two_hosts_runs_no_code_in_ranks(tmp_path: Path, attack: str) -> None:
    said, statuses = meddled_with(tmp_path, attack, f"{LAUNCH} {STATIC}", "left")
    assert statuses == [0, 0] or ("rankwise: " in said and 0 not in statuses), said
    assert attack != "connect" or statuses == [0, 0], said


@pytest.mark.parametrize("attack", variants(["write", "offer"], slow=["write"]))
def test_another_user_of_one_host_runs_no_code_in_ranks(tmp_path: Path, attack: str) -> None:
    """Nothing is signed there: the kernel tells whose the other end of a connection is."""
    said, statuses = meddled_with(tmp_path, attack, f"[ $HOST = 1 ] || {ALONE}")
    assert statuses == [0, 0] or "rankwise: " in said, said


@pytest.mark.rare
@pytest.mark.soak(10)
def test_a_thousand_connections_to_each_port_are_dropped(seed: int, tmp_path: Path) -> None:
    """They prove nothing: a third sends nothing, a third half a message, and a third garbage."""
    del seed  # what is sent, and when, is random by itself
    crowd = 'mkfifo "$3/in-$HOST"; "$PYTHON" "$2" 1000 "$3/ready-$HOST" < "$3/in-$HOST" & exec 8> "$3/in-$HOST"; '
    crowd += 'until [ -e "$3/ready-$HOST" ]; do sleep 0.05; done; '
    shell = f'{crowd} {LAUNCH} {STATIC} "$1"; status=$?; exec 8>&-; wait; exit $status'
    ended = on_two_hosts(tmp_path, shell, PLACED, str(CROWD), str(tmp_path), RANKWISE_SECRET=TEXT)
    check_places(places(ended), ["left", "left", "right", "right"])
    (opened,) = re.findall(r"^(\d+) connections to \d+ ports on left$", ended.stdout, re.MULTILINE)
    assert int(opened) >= 1000


def meddled_with(folder: Path, attack: str, launch: str, *host: str) -> tuple[str, list[int]]:
    """Launch while a stranger on each host meddles, who runs no code; return messages, and the exit statuses."""
    trace = folder / "code-has-run"
    shell = f'"$PYTHON" "$2" {attack} "$3" "$3-$HOST" {" ".join(host)} & stranger=$!; '
    shell += f'until [ -e "$3-$HOST" ]; do sleep 0.05; done; {launch} "$1"; status=$?; kill $stranger; '
    shell += 'echo "ended with $status"'
    ended = on_two_hosts(folder, shell, PLACED, STRANGER, str(trace), RANKWISE_SECRET=TEXT, JOIN_SECONDS="20")
    assert not trace.exists()
    lines = [line for line in ended.stdout.splitlines() if line.startswith("ended with")]
    assert len(lines) == 2, ended.stderr
    return ended.stderr + ended.stdout, [int(line.split()[-1]) for line in lines]
