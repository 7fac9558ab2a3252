"""`python -m rankwise.compat.torch_launch`: its command line, the programs it runs, and its exit status."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rankwise.compat import torch_launch
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port

LAUNCH = [sys.executable, "-m", "rankwise.compat.torch_launch"]
# Prints its arguments and its place, in one piece.
SHOW = (
    "import json, os, sys\n"
    "names = [n for n in os.environ if n.isupper() and n.split('_')[0] in "
    "{'MASTER', 'RANK', 'WORLD', 'LOCAL', 'GROUP', 'OMP'}]\n"
    "os.write(1, (json.dumps([sys.argv[1:], {n: os.environ[n] for n in names}]) + '\\n').encode())\n"
)


def launch(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environ()
    del environ["OMP_NUM_THREADS"]
    return subprocess.run(
        [*LAUNCH, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=200, check=False
    )


def received(ended: subprocess.CompletedProcess[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the arguments and variables that ranks received, by rank."""
    assert ended.returncode == 0, ended.stderr
    return sorted(map(json.loads, ended.stdout.splitlines()), key=lambda rank: int(rank[1]["RANK"]))


def write(path: Path, text: str, mode: int = 0o644) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["launch.py", *words])
    return vars(torch_launch.parse_args())


def test_the_command_line_is_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "nnodes": 1, "node_rank": 0, "nproc_per_node": 1, "master_addr": "127.0.0.1", "master_port": 29500,
        "use_env": True, "max_restarts": 0, "no_prefix": False,
        "training_script": "train.sh", "training_script_args": [],
    }  # fmt: skip
    assert parsed(monkeypatch, "train.sh") == wanted
    words = ["--nnodes=2", "--node_rank", "1", "--nproc_per_node", "8", "--master_addr", "a", "--master_port=1234"]
    wanted |= {"nnodes": 2, "node_rank": 1, "nproc_per_node": 8, "master_addr": "a", "master_port": 1234}
    assert parsed(monkeypatch, *words, "train.sh") == wanted
    dashed = [word.replace("_", "-") for word in words]
    assert parsed(monkeypatch, *dashed, "train.sh") == wanted
    theirs = ["--lr-drop", "40", "--master-port=1", "--use-env"]
    for end in ([], ["--"]):
        assert parsed(monkeypatch, *words, *end, "train.sh", *theirs) == wanted | {"training_script_args": theirs}


@pytest.mark.parametrize(
    ("words", "use_env"),
    [
        ([], True),
        (["--use_env"], True),
        (["--use-env"], True),
        (["--use_env=True"], True),
        (["--use-env=False"], False),
    ],
)
def test_use_env_has_a_value_or_none(words: list[str], use_env: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parsed(monkeypatch, *words, "--nproc_per_node", "2", "train.py", "--use_env", "--nproc-per-node")
    assert found["use_env"] is use_env
    assert found["training_script"] == "train.py"
    assert found["training_script_args"] == ["--use_env", "--nproc-per-node"], "what follows is the program's"


def test_a_count_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "--nproc_per_node=cpu", "train.py")["nproc_per_node"] == os.cpu_count()
    for words in (["--nproc_per_node=many", "a"], ["--use_env=perhaps", "a"], ["--no_such", "a"], []):
        with pytest.raises(SystemExit) as end:
            parsed(monkeypatch, *words)
        assert end.value.code == 2


@pytest.mark.parametrize("size", variants([1, 2, 4], slow=[2]))
def test_ranks_are_told_their_place(size: int, tmp_path: Path) -> None:
    script = write(tmp_path / "show.py", SHOW)
    found = received(launch("--no_prefix", f"--nproc_per_node={size}", script, "--lr", "two words", cwd=tmp_path))
    for rank, (args, place) in enumerate(found):
        assert args == ["--lr", "two words"]
        assert (place["RANK"], place["LOCAL_RANK"]) == (str(rank), str(rank))
        assert place["WORLD_SIZE"] == place["LOCAL_WORLD_SIZE"] == str(size)
        assert (place["MASTER_ADDR"], place["GROUP_RANK"]) == ("127.0.0.1", "0")
        assert int(place["OMP_NUM_THREADS"]) >= 1
    assert len({place["MASTER_PORT"] for _, place in found}) == 1


@pytest.mark.rare
def test_local_rank_is_an_argument_only_without_use_env(tmp_path: Path) -> None:
    """The original documents it, but never passes it."""
    script = write(tmp_path / "show.py", SHOW)
    found = received(launch("--no_prefix", "--nproc_per_node=2", "--use_env=False", script, "--lr", "1", cwd=tmp_path))
    assert [args for args, _ in found] == [["--lr", "1", f"--local_rank={rank}"] for rank in range(2)]


KINDS = [
    ("plain.py", "plain ['plain.py', 'a', 'b']\n"),
    ("./run.sh", "shell 0 a b\n"),
    ("./own.py", "own False\n"),
    ("./bare.py", "bare __main__\n"),
    ("echo", "a b\n"),
]


@pytest.mark.parametrize(("target", "wanted"), variants(KINDS, slow=KINDS[:2]))
def test_programs_of_any_kind_run(target: str, wanted: str, tmp_path: Path) -> None:
    """With the run bit it is a program, as in the original; a Python script need not have it, nor a first line."""
    write(tmp_path / "run.sh", "#!/bin/sh\necho shell $RANK $*\n", 0o755)
    write(tmp_path / "own.py", f"#!{sys.executable}\nimport sys\nprint('own', 'torch' in sys.modules)\n", 0o755)
    write(tmp_path / "plain.py", "import sys\nprint('plain', sys.argv)\n")
    write(tmp_path / "bare.py", "print('bare', __name__)\n", 0o755)
    ended = launch(target, "a", "b", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, wanted), ended.stderr


@pytest.mark.slow
def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    write(tmp_path / "run.sh", "#!/bin/sh\n")
    write(tmp_path / "odd.sh", "#!/no/such/shell\n", 0o755)
    write(tmp_path / "bare.sh", "echo\n", 0o755)
    for words, status, text in (
        (["./run.sh"], 2, "'./run.sh' cannot be run: chmod +x ./run.sh"),
        (["missing.sh"], 2, "program 'missing.sh' does not exist"),
        (["./odd.sh"], 126, "./odd.sh cannot be run: No such file or directory; does its first line name"),
        (["./bare.sh"], 126, "./bare.sh cannot be run: Exec format error; does its first line name"),
        (["--nproc_per_node=0", "echo"], 2, "nproc=0 is not a number of processes"),
        (["--nnodes=2", "--node_rank=2", "echo"], 2, "--node_rank=2 is not one of --nnodes=2 machines"),
        (["--nnodes=2", "--master_port=99999", "echo"], 2, "with a port from 1 to 65535"),
    ):
        ended = launch(*words, cwd=tmp_path)
        assert (ended.returncode, text in ended.stderr) == (status, True), ended.stderr
        assert "Traceback" not in ended.stderr


def bind_when_free(server: socket.socket, address: tuple[str, int]) -> None:
    """Take an address. Another test may have it for a moment, and would give it back while a launch looks at it."""
    deadline = time.monotonic() + 100
    while True:
        try:
            return server.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@pytest.mark.slow
def test_a_second_job_finds_a_port(tmp_path: Path) -> None:
    """The original uses 29500 for all, the fault that its users report most."""
    script = write(tmp_path / "show.py", SHOW)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind_when_free(taken, ("127.0.0.1", 29500))
        taken.listen()
        ((_, place),) = received(launch(script, cwd=tmp_path))
        assert place["MASTER_PORT"] != "29500"


@pytest.mark.rare
def test_a_port_of_ones_own_is_kept_or_refused(tmp_path: Path) -> None:
    script = write(tmp_path / "show.py", SHOW)
    port = str(free_port())
    ((_, place),) = received(launch(f"--master_port={port}", script, cwd=tmp_path))
    assert place["MASTER_PORT"] == port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = launch(f"--master_port={port}", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"port {port} of this host cannot be used: Address already in use" in ended.stderr


@pytest.mark.slow
def test_a_dead_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    """The original waits for rank 0 first, and for ever: it looks at the ranks one after the other."""
    script = write(tmp_path / "die.sh", "#!/bin/sh\n[ $RANK = 1 ] && kill -9 $$\necho $$\nexec sleep 600\n", 0o755)
    ended = launch("--no_prefix", "--nproc_per_node=3", script, cwd=tmp_path)
    assert ended.returncode == 137
    assert "rank 1 of 3 on " in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert not [pid for pid in ended.stdout.split() if psutil.pid_exists(int(pid))]


@pytest.mark.slow
def test_the_status_of_the_first_failure_is_kept_and_ranks_may_be_started_again(tmp_path: Path) -> None:
    script = write(tmp_path / "fail.sh", "#!/bin/sh\necho again\nexit 7\n", 0o755)
    ended = launch("--max_restarts=1", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (7, "again\nagain\n")


SIGNALS = [(signal.SIGTERM, "TERM", 143), (signal.SIGINT, "INT", 130), (signal.SIGHUP, "TERM", 129)]


@pytest.mark.parametrize(("number", "heard", "status"), variants(SIGNALS, slow=SIGNALS[:1]))
def test_signals_are_passed_on(number: signal.Signals, heard: str, status: int, tmp_path: Path) -> None:
    """The original ends of them alone, and its ranks keep their GPUs."""
    script = write(
        tmp_path / "wait.sh",
        '#!/bin/sh\nfor name in INT TERM; do trap "echo $RANK heard $name; exit 0" $name; done\n'
        "echo up\nwhile :; do sleep 0.1; done\n",
        0o755,
    )
    launcher = subprocess.Popen(
        [*LAUNCH, "--no_prefix", "--nproc_per_node=2", script],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        children = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=200)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == status, err
    assert sorted(out.splitlines()) == [f"{rank} heard {heard}" for rank in range(2)]
    assert not any(child.is_running() for child in children)
