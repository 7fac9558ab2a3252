"""`rankwise doctor` on two hosts, which are network namespaces: what only several hosts can have wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.hosts import HERE, needs_namespaces, on_two_hosts

pytestmark = [needs_namespaces, pytest.mark.slow]

# Two ranks on each host, as a shell starts them: none ends another.
DOCTOR = f'"$PYTHON" {HERE / "programs" / "doctor_rank.py"} --json --timeout 60 --failing-hosts "$1"'
RANK = f"RANK=$((2 * HOST + LOCAL)) LOCAL_RANK=$LOCAL WORLD_SIZE=4 MASTER_ADDR=10.9.9.1 MASTER_PORT=29500 {DOCTOR}"
PLAIN = f'pids=; for LOCAL in 0 1; do {RANK} & pids="$pids $!"; done; wait $pids'
SECOND = "ip link add docker0 type dummy; ip link set docker0 up; ip addr add 172.17.0.1/16 dev docker0; "


def bad(folder: Path, before: str = "", **variables: str) -> list[dict[str, Any]]:
    """Return what is not OK, but for the threads of a machine with few CPUs."""
    file = str(folder / "failing-hosts.txt")
    ended = on_two_hosts(folder, before + PLAIN, file, **variables)
    found = json.loads(ended.stdout)["findings"]
    return [one for one in found if one["level"] != "OK" and one["check"] != "threads"]


def test_two_hosts_are_fit(tmp_path: Path) -> None:
    assert bad(tmp_path, SECOND) == []
    assert (tmp_path / "failing-hosts.txt").read_text() == ""


# The second host has little shared memory, a file system without room, closed ports, and a clock that is wrong.
FAULTY = "exec unshare --mount sh -c 'mount -t tmpfs -o size=64m none /dev/shm; "
FAULTY += "mkdir full; mount -t tmpfs -o size=1m none full; head -c 2m /dev/zero > full/zeros 2> /dev/null; "
FAULTY += 'TMPDIR=$PWD/full CLOCK_OFFSET=-90 CLOSED_PORT=1 exec sh -c "$DOCTORS" sh "$1"\' sh "$1"; '


def test_each_fault_of_a_host_is_named(tmp_path: Path) -> None:
    names = "127.0.0.1 localhost\n10.9.9.1 left\n127.0.1.1 right\n"
    found = bad(tmp_path, f"cd {tmp_path}; [ $HOST = 0 ] || {FAULTY}", names=names, DOCTORS=PLAIN)
    assert {(one["check"], one["level"], *one["ranks"]) for one in found} == {
        ("clocks", "WARN", 2),
        ("ports", "FAIL", 2),
        ("loopback", "WARN", 2, 3),
        ("full folders", "FAIL", 2, 3),
        ("shared memory", "WARN", 2, 3),
    }
    assert {host for one in found for host in one["hosts"]} == {"right"}
    texts = {one["check"]: one["text"] for one in found}
    assert texts["clocks"] == "the clock is 90.0 s behind that of rank zero"
    assert texts["ports"].startswith("no way from left to right: port ")
    assert (tmp_path / "failing-hosts.txt").read_text() == "right\n"


@pytest.mark.rare
def test_a_name_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    silent = HERE / "programs" / "silent_port.py"
    shell = f'"$PYTHON" {silent} & server=$!; {PLAIN}; kill $server'
    ended = on_two_hosts(tmp_path, shell, "/dev/null")
    found = {one["check"]: one for one in json.loads(ended.stdout)["findings"] if one["level"] != "OK"}
    assert found["reverse names"]["ranks"] == [0, 1, 2, 3]
    assert not [one for one in found.values() if one["level"] == "FAIL"]
