"""`rankwise launch --ssh` and `launch(hosts=)` over a real sshd on each of two hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clusters.hosts import HERE, PLACED, check_places, needs_namespaces, places
from tests.clusters.ssh import INTERRUPTED, LAUNCH, STEPS, output_of, over_ssh
from tests.lanes import variants

pytestmark = [needs_namespaces, pytest.mark.slow]

ON_SSH = str(HERE / "programs" / "on_ssh.py")
# When all four ranks of the first attempt have reduced.
MEET = 'until [ -e "$TMPDIR/4-0-0" ] && [ -e "$TMPDIR/4-0-3" ]; do sleep 0.1; done; '


HOSTS = [("gpu-b,gpu-a", ["right", "left"]), ("left,gpu-b", ["left", "right"])]


@pytest.mark.parametrize(("hosts", "names"), variants(HOSTS, slow=HOSTS[1:]))
def test_ranks_are_in_the_order_of_the_hosts(tmp_path: Path, hosts: str, names: list[str]) -> None:
    """With the first host over ssh, or as the launcher's own: its address is found though no name of it resolves."""
    ended = over_ssh(tmp_path, f'{LAUNCH} {hosts} --no-prefix "$1"; echo "ended with $?"', PLACED)
    assert output_of(ended)[-1] == "ended with 0", ended.stderr
    check_places(places(ended), [names[0], names[0], names[1], names[1]])
    assert "have no secret" not in ended.stderr


def test_results_and_failures_of_a_function(tmp_path: Path) -> None:
    """In a program: the results by rank; the failures of all ranks with their hosts, and the exception as the cause.

    The results tell whether the secret of the job is in the command line of any process.
    """
    ended = over_ssh(tmp_path, '"$PYTHON" "$1" gpu-a gpu-b', ON_SSH)
    results, failed, cause = output_of(ended)
    assert results == "[(0, 'left', False), (1, 'left', False), (2, 'right', False), (3, 'right', False)]"
    assert failed.startswith("rank 3 of 4 on right raised KeyError: 'no such'; [")
    assert failed.endswith("[(0, 'left'), (1, 'left'), (2, 'right'), (3, 'right')]")
    assert cause == "KeyError('no such')"


REFUSED = {
    "gpu-a,gpu-x": "host gpu-x cannot be used: ssh cannot connect to it; .*\n  ssh: connect to host 10.9.9.9 port 22",
    "gpu-a,no-such-name": "host no-such-name cannot be used: ssh cannot connect to it; is it spelled",
    "gpu-b --ssh-command 'ssh -F '$TMPDIR/other_key_config": "host gpu-b .* ssh has to log in without a password",
    "gpu-b --ssh-command 'ssh -F '$TMPDIR/other_host_config": "host gpu-b .* connect once by hand to see its key",
    "gpu-b --ssh-command no-such-ssh": "host gpu-b cannot be used: no-such-ssh cannot be started: No such file",
    "gpu-a,no-rankwise": "host no-rankwise cannot be used: rankwise is not installed for .*/python",
    "gpu-a,no-python": "host no-python cannot be used: the interpreter .*/python.* cannot be started there",
    "gpu-a,no-folder": "host no-folder: the working directory '.*/work/here' cannot be used there: No such file",
}


def test_hosts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    shell = (
        'mkdir "$TMPDIR/work/here"; cd "$TMPDIR/work/here"; '
        'sed "s#/key#/other_key#" "$TMPDIR/ssh_config" > "$TMPDIR/other_key_config"; '
        'sed "s#/known_hosts#/other_hosts#" "$TMPDIR/ssh_config" > "$TMPDIR/other_host_config"; '
    )
    shell += "".join(f'{LAUNCH} {options} --no-python true; echo "ended with $?"; ' for options in REFUSED)
    ended = over_ssh(tmp_path, shell)
    assert output_of(ended) == ["ended with 1"] * len(REFUSED), ended.stderr
    for message in REFUSED.values():
        assert re.search(message, ended.stderr), ended.stderr


ENDS = [
    ("ctrl-c", 130, "leaves with KeyboardInterrupt"),
    ("SIGKILL", -9, ""),
    ("ssh", 1, "rankwise: host gpu-a is lost: the connection to it is lost: ssh was killed by SIGKILL"),
    ("watchdog", 1, "rankwise: host gpu-[ab] is lost: "),
    ("launcher", 1, "rankwise: host gpu-[ab] is lost: its launcher was killed by SIGKILL"),
]


@pytest.mark.parametrize(
    ("how", "status", "shown"),
    variants(ENDS, slow=ENDS[:3]),
)
def test_the_end_of_the_launcher_or_a_host_ends_all(tmp_path: Path, how: str, status: int, shown: str) -> None:
    """By Ctrl-C on the terminal; SIGKILL to the command, to an ssh, to a watchdog, or to a launcher."""
    command = f'"$PYTHON" "$1" {how} "$TMPDIR" {LAUNCH} gpu-a,gpu-b "$2" 100 "$TMPDIR"'
    ended = over_ssh(tmp_path, command, INTERRUPTED, STEPS)
    lines = output_of(ended)
    assert lines[-1] == f"ended with {status}", ended.stdout + ended.stderr
    assert (tmp_path / "4-0-3").exists()
    assert re.search(shown, ended.stdout), ended.stdout


@pytest.mark.rare
def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    """Even of the first one, which has the store: the launcher tells the others where they meet instead."""
    lose = f'({MEET} pkill -9 -o -x ssh; until [ -e "$TMPDIR/4-1-3" ]; do sleep 0.1; done; : > "$TMPDIR/enough") & '
    launch = f'{LAUNCH} gpu-a,gpu-b,gpu-c --nnodes 2 --max-restarts 2 "$1" 100 "$TMPDIR"; echo "ended with $?"'
    ended = over_ssh(tmp_path, lose + launch, STEPS)
    assert output_of(ended) == ["ended with 0"], ended.stderr
    assert "rankwise: the launch goes on without host gpu-a" in ended.stderr
    assert not list(tmp_path.glob("2-*"))


@pytest.mark.rare
def test_the_hosts_that_are_left_go_on_if_they_are_enough(tmp_path: Path) -> None:
    lose = f'({MEET} pkill -9 -n -x ssh; until [ -e "$TMPDIR/2-1-1" ]; do sleep 0.1; done; : > "$TMPDIR/enough") & '
    launch = f'{LAUNCH} gpu-a,gpu-b --nnodes 1:2 --max-restarts 2 "$1" 100 "$TMPDIR"; echo "ended with $?"'
    ended = over_ssh(tmp_path, lose + launch, STEPS)
    assert output_of(ended) == ["ended with 0"], ended.stderr
    assert re.search("host gpu-. is lost: .* was killed by SIGKILL; the ranks restart on the other hosts", ended.stderr)


@pytest.mark.rare
def test_a_host_that_is_cut_off_is_named_and_ends_by_itself(tmp_path: Path) -> None:
    cut = f'({MEET} ip link set left0 down) & RANKWISE_SSH="$RANKWISE_SSH -o ServerAliveInterval=1" '
    ended = over_ssh(tmp_path, f'{cut} {LAUNCH} left,gpu-b "$1" 3 "$TMPDIR"; echo "ended with $?"', STEPS)
    assert output_of(ended) == ["ended with 1"], ended.stderr
    assert re.search("rankwise: .*(host gpu-b is lost|host 1 .right. is lost)|Missing: rank 2 on right", ended.stderr)
