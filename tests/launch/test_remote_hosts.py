"""Hosts over ssh, as far as this host has them: itself, and commands in place of ssh. tests/clusters has an sshd."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import rankwise as rw
from rankwise._launch.other_hosts.watchdog import version
from tests.lanes import variants
from tests.session.worlds import clean_environ, run_in

OWN = socket.gethostname()
LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]


def who_am_i() -> tuple[int, int, str]:
    with rw.init(timeout=100.0):
        return rw.all_reduce(1), rw.get_rank(), os.environ["GROUP_RANK"]


@pytest.mark.skipif(OWN in {"", "localhost"}, reason="this host has no name beside localhost")
def test_two_launchers_of_this_host_are_one_world() -> None:
    assert rw.launch(who_am_i, nproc=1, hosts=["localhost", OWN]) == [(2, 0, "0"), (2, 1, "1")]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "not a list of names of hosts"),
        ("gpu-01", "not a list of names of hosts"),
        (["-oProxyCommand=sh"], "not the name of a host"),
        (["gpu 01"], "not the name of a host"),
        (["gpu-01", "gpu-01"], "named twice"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(hosts: list[str], message: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=message):
        rw.launch(who_am_i, nproc=1, hosts=hosts)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    variants(
        [
            (["--ssh", "a,b", "--nnodes", "3"], 2, "nnodes=3 is above the number of hosts, 2: a, b"),
            (
                ["--ssh", "a,b", "--node-rank", "1"],
                2,
                "--node-rank and --ssh exclude each other: the hosts have an order",
            ),
            (["--ssh", "a,b", "--debug", "1"], 2, "--debug and --ssh exclude each other: ranks of other hosts"),
            (
                ["--ssh", "a", "--ssh-command", "sh -c 'exit 7'"],
                1,
                "has ended with exit status 7 before it could answer",
            ),
            (["--srun"], 2, "SLURM_JOB_NODELIST is not set: run the command in salloc or sbatch"),
            (["--ssh", "localhost", "no-such.py"], 2, "host localhost: script 'no-such.py' does not exist"),
        ],
        fast=[(["--ssh", "a,b", "--debug", "1"], 2, "--debug and --ssh exclude each other: ranks of other hosts")],
    ),
)
def test_the_command_refuses_what_cannot_be(options: list[str], status: int, message: str, tmp_path: Path) -> None:
    target = [] if options[-1].endswith(".py") else ["--no-python", "true"]
    ended = run_in(tmp_path, [*LAUNCH, *options, *target])
    assert (ended.returncode, message in ended.stderr) == (status, True), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"version": "0.0.1"}, "it has rankwise 0.0.1 in /old, and this launcher has "),
        ({"version": version(), "python": "3.9"}, "is Python 3.9 there, and this launcher has Python "),
    ],
)
def test_a_host_of_another_version_is_named(tmp_path: Path, found: dict[str, str], message: str) -> None:
    """Its first line comes after what its shell prints, which is shown."""
    fields = {"folder": "/old", "hostname": "a", "python": "", "client": "", "server": "", **found}
    line = "rankwise-host " + json.dumps(fields)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho 'Welcome!'\necho '{line}'\nexec cat > /dev/null\n")
    (tmp_path / "ssh").chmod(0o755)
    ended = run_in(tmp_path, [*LAUNCH, "--ssh", "a", "--ssh-command", str(tmp_path / "ssh"), "--no-python", "true"])
    assert ended.returncode == 1
    assert "Welcome!" in ended.stderr
    assert "host a cannot be used: " in ended.stderr
    assert message in ended.stderr


def in_place_of_ssh(folder: Path, script: str, *target: str) -> subprocess.CompletedProcess[str]:
    """Launch on a host that a shell script connects to, whose last argument is the command for the host."""
    (folder / "ssh").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "ssh").chmod(0o755)
    return run_in(folder, [*LAUNCH, "-n", "1", "--ssh", "a", "--ssh-command", str(folder / "ssh"), *target])


@pytest.mark.slow
def test_a_shell_may_print_before_the_launcher_starts_also_half_a_line(tmp_path: Path) -> None:
    ended = in_place_of_ssh(tmp_path, 'printf "Hi\\nyou: "; eval "${@: -1}"', "--no-python", "echo", "done")
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert ended.stderr.startswith("Hi\nyou: \n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("timeout 1 cat; exit 5", "has ended with exit status 5 before it could answer: no output"),
        ("yes", "cannot be used: what ssh starts there prints without an end, and is not rankwise"),
        ("echo 'No account for you.'; exit 1", "with exit status 1 before it could answer: No account for you."),
    ],
)
def test_nothing_is_sent_to_what_is_not_rankwise(tmp_path: Path, script: str, message: str) -> None:
    """The first one would print what it reads, and the secret with it."""
    ended = in_place_of_ssh(tmp_path, script, "--no-python", "true")
    assert ended.returncode == 1
    assert message in ended.stderr
    assert len(ended.stderr) < 1000


@pytest.mark.slow
def test_a_launcher_that_another_process_has_stopped_is_an_error(tmp_path: Path) -> None:
    """Not the end of a launch without errors, whose results are missing."""
    target = ("--no-python", "sh", "-c", "kill -TERM $(ps -o ppid= $PPID); sleep 100")
    ended = in_place_of_ssh(tmp_path, 'eval "${@: -1}"', *target)
    assert ended.returncode == 1
    assert "host a: its launcher was stopped by SIGTERM, and not from this terminal" in ended.stderr


@pytest.mark.slow
def test_output_has_the_prefixes_of_one_host_and_the_status_is_that_of_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys\nprint('out', os.environ['FLAG'], 'HOME' in os.environ)\n"
        "print('no end', end='', file=sys.stderr)\nsys.exit(7)\n"
    )
    command = [*LAUNCH, "-n", "2", "--ssh", "localhost", "--prefix", "host", "fails.py"]
    ended = subprocess.run(
        command, env=clean_environ(FLAG="flag"), cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 7
    name = OWN.partition(".")[0]
    lines = ended.stdout.splitlines()
    assert lines
    assert set(lines) <= {f"[{name} {rank}] out flag True" for rank in range(2)}
    assert "] no end\n" in ended.stderr
    assert f"of 2 on {OWN} ended with exit code 7" in ended.stderr


@pytest.mark.slow
def test_ctrl_z_stops_the_ranks_and_fg_continues_them_and_ctrl_backslash_shows_them(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'pid-{os.getpid()}').touch()\n"
        "while not pathlib.Path('enough').exists(): time.sleep(0.05)\n"
    )
    shown = tmp_path / "shown"
    with shown.open("w") as stream:
        command = [*LAUNCH, "-n", "2", "--ssh", "localhost", "waits.py"]
        launcher = subprocess.Popen(command, env=clean_environ(), cwd=tmp_path, stderr=stream)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        ranks = [psutil.Process(int(path.name.removeprefix("pid-"))) for path in tmp_path.glob("pid-*")]
        processes = [psutil.Process(launcher.pid), *ranks]
        launcher.send_signal(signal.SIGTSTP)
        wait_until(lambda: {process.status() for process in processes} == {psutil.STATUS_STOPPED})
        launcher.send_signal(signal.SIGCONT)
        wait_until(lambda: psutil.STATUS_STOPPED not in {process.status() for process in processes})
        launcher.send_signal(signal.SIGQUIT)
        wait_until(lambda: "rankwise: stacks of ranks 0-1 on " in shown.read_text())
        (tmp_path / "enough").touch()
        assert launcher.wait(200) == 0
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.rare
@pytest.mark.skipif(OWN in {"", "localhost"}, reason="this host has no name beside localhost")
def test_a_failure_is_seen_on_all_hosts_while_nobody_reads_their_output(tmp_path: Path) -> None:
    """The output waits on the hosts, and nothing that they have to tell each other waits behind it."""
    (tmp_path / "floods.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
        "if rank == '1':\n    while not Path('printed').exists(): time.sleep(0.05)\n"
        "    time.sleep(3)\n    sys.exit(7)\n"
        "for line in range(1 << 20):\n    print('x' * 1000)\n"
        "    if line == 500: Path('printed').touch()\n"
    )
    command = [*LAUNCH, "-n", "1", "--ssh", f"localhost,{OWN}", "floods.py"]
    launcher = subprocess.Popen(
        command, env=clean_environ(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until((tmp_path / "printed").exists)
        assert launcher.wait(100) == 7
    finally:
        launcher.kill()
        _, errors = launcher.communicate()
    assert f"rank 1 of 2 on {OWN} ended with exit code 7" in errors
    assert "nobody read standard output for 20 s" in errors


@pytest.mark.slow
@pytest.mark.skipif(OWN in {"", "localhost"}, reason="this host has no name beside localhost")
def test_a_launcher_that_does_not_end_when_another_host_is_lost_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'pid-{os.getpid()}').touch()\ntime.sleep(1000)\n"
    )
    command = [*LAUNCH, "-n", "1", "--ssh", f"localhost,{OWN}", "waits.py"]
    launch = subprocess.Popen(command, env=clean_environ(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        watchdogs = psutil.Process(launch.pid).children()
        for watchdog in watchdogs:
            watchdog.children()[0].suspend()  # as one that waits in compiled code
        watchdogs[0].kill()
        assert launch.wait(100) == 1
    finally:
        launch.kill()
        _, errors = launch.communicate()
    assert re.search("the launcher of host .* did not end, and is killed", errors)
    assert re.search("host .* is lost: its launcher was killed by SIGKILL", errors)
    wait_until(lambda: not any(psutil.pid_exists(int(path.name[4:])) for path in tmp_path.glob("pid-*")))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
