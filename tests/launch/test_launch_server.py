"""Launches that a launch server runs: with the state of their client, and with nothing of an earlier one."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

RANKWISE = str(Path(sys.executable).parent / "rankwise")
# Runs until the file "go" exists, and names the ranks that run.
WAITS = """
import os, time, pathlib
pathlib.Path(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
while not pathlib.Path("go").exists(): time.sleep(0.02)
print("went")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder to work in, with launch servers of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with tempfile.TemporaryDirectory() as sockets:  # with a short path
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        yield folder
        servers("stop")


def servers(command: str = "list") -> str:
    return subprocess.run([RANKWISE, "server", command], capture_output=True, text=True, check=True).stdout


def pids() -> list[int]:
    return [int(pid) for pid in re.findall(r"^process (\d+)", servers(), re.MULTILINE)]


def command(*options: str, script: str, nproc: int = 1) -> list[str]:
    Path("script.py").write_text(script)
    return [RANKWISE, "launch", "-n", str(nproc), "--keep", *options, "script.py", "word"]


def run(*options: str, script: str, nproc: int = 1, text: str = "") -> subprocess.CompletedProcess[str]:
    arguments = command(*options, script=script, nproc=nproc)
    return subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=200, check=False)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_waiting(nproc: int = 2) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a launch whose ranks wait, and return it and the ids of its ranks."""
    for path in Path.cwd().glob("rank*"):
        path.unlink()
    arguments = command(script=WAITS, nproc=nproc)
    client = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    files = [Path(f"rank{rank}") for rank in range(nproc)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return client, [int(file.read_text()) for file in files]


def test_the_second_launch_has_the_state_of_its_own_client(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import os, signal, sys
import rankwise as rw
import torch
torch.set_num_threads(1)
rank = rw.init().rank
here = "elsewhere" if os.getcwd().endswith("other") else "here"
ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
line = sys.stdin.readline().strip() if rank == 0 else ""
print(rw.all_reduce(rank + 1), here, sys.argv, os.environ.get("TERM"), ignored, oct(os.umask(0)), line)
print("to stderr", file=sys.stderr)
sys.exit(3 if line == "fail" else 0)
"""
    monkeypatch.setenv("TERM", "first")
    one = run(script=script, nproc=2, text="typed\n")
    assert one.returncode == 0, one.stderr
    first = "3 here ['script.py', 'word'] first False 0o22"
    assert sorted(one.stdout.splitlines()) == [f"[0] {first} typed", f"[1] {first} "]
    server = pids()
    assert len(server) == 1

    monkeypatch.setenv("TERM", "second")  # of the shell: the server stays
    other = here / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    before = os.umask(0o27), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        two = run(script=script, nproc=2, text="fail\n")
    finally:
        os.umask(before[0])
        signal.signal(signal.SIGHUP, before[1])
    assert two.returncode == 3
    second = "3 elsewhere ['script.py', 'word'] second True 0o27"
    assert sorted(two.stdout.splitlines()) == [f"[0] {second} fail", f"[1] {second} "]
    assert "rankwise: rank 0 of 2" in two.stderr
    assert pids() == server


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_what_a_fork_would_not_have_starts_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    package = site / "installed.py"
    package.write_text("import os\nA, PID = 'before', os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    script = "import installed, os\nprint(installed.A, installed.PID == os.getpid(), os.environ.get('LR'))"

    def output() -> str:
        ended = run("--preload", "installed", script=script)
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout.strip()

    assert [output(), output()] == ["before False None"] * 2
    (first,) = pids()
    package.write_text("import os\nA, PID = 'edited now', os.getpid()\n")
    assert output() == "edited now False None"
    (second,) = pids()
    assert second != first
    (site / "another.py").write_text("")  # a module may have looked for it
    output()
    (third,) = pids()
    assert third != second
    monkeypatch.setenv("LR", "0.1")
    assert output() == "edited now False 0.1"
    found = pids()
    assert len(found) == 2
    assert third in found


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_modules_of_the_user_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "project"
    own.mkdir()
    (own / "project.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.setenv("PYTHONPATH", str(own))
    ended = run("--preload", "project", script="import os, project\nprint(project.PID == os.getpid())")
    assert ended.stdout == "True\n"
    assert ended.stderr == "rankwise: imported by each rank, since it is no installed package: project\n"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_ranks_end_with_the_client_and_with_the_server() -> None:
    run(script="", nproc=2)
    (server,) = pids()

    client, ranks = start_waiting()
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=100)
    assert client.returncode == 130, errors
    assert not any(psutil.pid_exists(rank) for rank in ranks)

    client, ranks = start_waiting()
    client.send_signal(signal.SIGTERM)
    _, errors = client.communicate(timeout=100)
    assert client.returncode == 143, errors
    assert not any(psutil.pid_exists(rank) for rank in ranks)

    client, ranks = start_waiting()
    client.kill()
    client.communicate(timeout=100)
    wait_for(lambda: not any(psutil.pid_exists(rank) for rank in ranks))
    assert pids() == [server]

    client, ranks = start_waiting()
    os.kill(server, signal.SIGKILL)
    _, errors = client.communicate(timeout=100)
    assert (client.returncode, errors) == (1, "rankwise: the launch server was killed, and the ranks with it\n")
    wait_for(lambda: not any(psutil.pid_exists(rank) for rank in ranks))
    assert servers() == "no launch server is running\n"
    assert run(script="print('again')").stdout == "again\n"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_server_that_is_stopped_ends_after_its_launch() -> None:
    client, _ = start_waiting()
    (server,) = pids()
    assert re.match(rf"process {server}: runs 1 launch, started \d+ s ago, \d+ MB \(torch; ", servers())
    assert servers("stop") == f"process {server}: ends after 1 launch\n"
    assert servers() == "no launch server is running\n"
    Path("go").touch()
    output, errors = client.communicate(timeout=100)
    assert (client.returncode, sorted(output.splitlines()), errors) == (0, ["[0] went", "[1] went"], "")
    wait_for(lambda: not psutil.pid_exists(server))


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_few_idle_servers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        monkeypatch.setenv("NUMBER", str(number))
        assert run(script="import os\nprint(os.environ['NUMBER'])").stdout == f"{number}\n"
    assert len(pids()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_launches_at_once_share_a_server() -> None:
    arguments = command(script="import os\nprint(os.environ['RANK'])", nproc=2)
    clients = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [client.communicate(timeout=200)[0] for client in clients]
    assert [sorted(output.split()) for output in outputs] == [["0", "1", "[0]", "[1]"]] * 4
    assert [client.returncode for client in clients] == [0] * 4
    assert len(pids()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_folder_that_others_may_enter_is_refused() -> None:
    sockets = Path(os.environ["XDG_RUNTIME_DIR"]) / "rankwise"
    sockets.mkdir(mode=0o755)
    ended = run(script="print(1)")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"rankwise: {sockets} is not a folder that only this user may enter (mode 0700): launch servers are not used "
        "there, since others could answer in place of them; remove it\n"
    )
    sockets.rmdir()
    run(script="")
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_server_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "ending.py").write_text("import os\nprint('ending now', flush=True)\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    ended = run("--preload", "ending", script="print(1)")
    assert (ended.returncode, ended.stdout) == (1, "ending now\n")
    assert ended.stderr == (
        "rankwise: the launch server could not start (exit code 7): see what it printed, and its memory limit\n"
    )
    ended = run("--no-preload", script="print(1)")
    assert ended.returncode == 2
    assert "--keep and --no-preload exclude each other" in ended.stderr
    assert run("--preload", "absent", script="print(1)").returncode == 2
    assert servers() == "no launch server is running\n"


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_an_unused_server_ends() -> None:
    path = Path(os.environ["XDG_RUNTIME_DIR"]) / "server.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        code = "from rankwise._launch.launchserver import daemon\ndaemon._IDLE_SECONDS = 0.1\ndaemon.main([])"
        arguments = [sys.executable, "-c", code, str(listener.fileno()), "rankwise:is_joined", "{}", ""]
        server = subprocess.Popen(arguments, pass_fds=[listener.fileno()])
    assert server.wait(100) == 0
    assert not path.exists()
