"""Two hosts whose names and interfaces are not as simple as in the other tests: ranks join, or are told what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, HERE, PLACED, check_places, needs_namespaces, on_two_hosts, places
from tests.lanes import variants

pytestmark = [needs_namespaces, pytest.mark.slow]

LAUNCH = f"{BIN / 'rankwise'} launch -n 2 --no-prefix --nnodes 2 "
STATIC = "--node-rank $HOST --master-addr {0} --rdzv-conf timeout={1} "
C10D = "--rdzv-backend c10d --rdzv-endpoint {0}:29400 --rdzv-conf read_timeout={1} "
RANK = 'RANK=$((2 * HOST + LOCAL)) WORLD_SIZE=4 MASTER_ADDR=left MASTER_PORT=29500 "$PYTHON" "$1"'
PLAIN = f"for LOCAL in 0 1; do {RANK} & done; wait"
LOOPBACK = "127.0.0.1 localhost\n"
# As on Debian: each host has its own name on loopback, and a complete one.
DEBIAN = (
    f"{LOOPBACK}127.0.1.1 left.lan left\n10.9.9.2 right.lan right\n",
    f"{LOOPBACK}10.9.9.1 left.lan left\n127.0.1.1 right.lan right\n",
)
UNKNOWN = (f"{LOOPBACK}127.0.1.1 left.lan left\n", f"{LOOPBACK}127.0.1.1 right.lan right\n")
# A second interface of each host, with a cable that leads nowhere.
SECOND = "ip link add lost type veth peer name end; ip link set end up; ip link set lost up; "
SECOND += "ip addr add 192.168.7.$((HOST + 1))/24 dev lost; "
TWO_ADDRESSES = "192.168.7.1 left\n10.9.9.1 left\n192.168.7.2 right\n10.9.9.2 right\n"
ONLY_IPV6 = "dev=left0; [ $HOST = 0 ] || dev=right0; ip -4 addr flush dev $dev; "
ONLY_IPV6 += "ip -6 addr add fd00::$((HOST + 1))/64 dev $dev nodad; "
OWN_NAMES = f'unshare --mount sh {HERE / "own_names.sh"} "$2" '


def joined_on(folder: Path, shell: str, names: str = LOOPBACK) -> str:
    """Join from both hosts, check who is where, and return standard error; host 0 of c10d may be either."""
    ended = on_two_hosts(folder, shell, PLACED, str(folder), names=names)
    found = places(ended)
    first = found[0]["host"]
    other = "right" if first == "left" else "left"
    check_places(found, [first, first, other, other])
    return ended.stderr


def give_names(folder: Path, names: tuple[str, str]) -> None:
    for host, text in enumerate(names):
        (folder / f"hosts-{host}").write_text(text)


def test_hosts_whose_own_names_are_of_loopback(tmp_path: Path) -> None:
    give_names(tmp_path, DEBIAN)
    joined_on(tmp_path, f'exec {OWN_NAMES} {LAUNCH} {C10D.format("left.lan", 60)} "$1"')


@pytest.mark.rare
def test_hosts_that_know_no_name_of_the_other(tmp_path: Path) -> None:
    """Torch takes the host of the endpoint for another one, since its name is of loopback."""
    give_names(tmp_path, UNKNOWN)
    joined_on(tmp_path, f'exec {OWN_NAMES} {LAUNCH} {C10D.format("10.9.9.1", 60)} "$1"')


STARTS = [f'exec {LAUNCH} {STATIC.format("left", 60)} "$1"', PLAIN]


@pytest.mark.parametrize("start", variants(STARTS, slow=[PLAIN]), ids=["launch", "plain"])
def test_hosts_with_an_interface_that_leads_nowhere(tmp_path: Path, start: str) -> None:
    """The names have its address first, where gloo would listen."""
    joined_on(tmp_path, SECOND + start, LOOPBACK + TWO_ADDRESSES)


def test_hosts_with_ipv6_alone_and_without_a_secret_which_they_are_told_once(tmp_path: Path) -> None:
    messages = joined_on(tmp_path, f'{ONLY_IPV6} exec {LAUNCH} {C10D.format("[fd00::1]", 60)} "$1"')
    assert messages.count("the hosts of this job have no secret") == 1


@pytest.mark.rare
def test_hosts_whose_name_server_does_not_answer(tmp_path: Path) -> None:
    """Torch's stores look up the name of each connection's address; here that takes 1 s."""
    silent = HERE / "programs" / "silent_port.py"
    shell = f'"$PYTHON" {silent} & server=$!; {LAUNCH} {STATIC.format("10.9.9.1", 60)} "$1"; status=$?; '
    joined_on(tmp_path, f"{shell} kill $server; exit $status")


HEADS = [STATIC.format("left", 3), C10D.format("left", 3)]


@pytest.mark.parametrize("options", variants(HEADS, slow=HEADS[:1]), ids=["static", "c10d"])
def test_a_name_that_is_of_loopback_on_another_host_is_named(tmp_path: Path, options: str) -> None:
    shell = f'if [ $HOST = 0 ]; then exit; fi; {LAUNCH} {options} "$1"; echo "ended with $?"'
    ended = on_two_hosts(tmp_path, shell, PLACED, names=f"{LOOPBACK}127.0.1.1 left right\n")
    assert ended.stdout == "ended with 1\n"
    said = "(left is 127.0.1.1 on right, which no other host can reach: correct /etc/hosts there, or give its address"
    assert said in ended.stderr, ended.stderr
    assert "within 3 s" in ended.stderr
    assert "Traceback" not in ended.stderr
