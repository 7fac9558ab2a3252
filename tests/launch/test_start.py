"""Errors at the start of a world: a fork server that dies, a network that is down, a lack of descriptors."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
LAUNCH = [RANKWISE, "launch", "-n", "2", "--no-python"]
# A host's name may have 64 characters, and a label that the name server is asked for 63.
LONG_NAME = "a" * 64

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest")
PROGRAM = Path(__file__).parents[1] / "testing" / "programs" / "needs_torch.py"

ELSEWHERE = ["unshare", "--map-root-user"]
NAMESPACES = pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "hostname")))
    or subprocess.run([*ELSEWHERE, "--net", "--uts", "true"], check=False, capture_output=True).returncode != 0,
    reason="no unshare or hostname, or no right to make namespaces",
)


def run(*command: str, prepare: Callable[[], None] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=clean_environ(**variables), capture_output=True, text=True, timeout=200, check=False,
        preexec_fn=prepare,
    )  # fmt: skip


@pytest.mark.parametrize("caller", variants(["command", "function"], slow=["command"]))
def test_a_fork_server_that_ends_at_its_start_is_reported(caller: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'server' in ' '.join(sys.orig_argv[1:3]):\n    os._exit(7)\n"
    )
    function = [sys.executable, "-c", "import rankwise; rankwise.launch(print, nproc=2)"]
    ended = run(*{"command": [*LAUNCH, "true"], "function": function}[caller], PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    wanted = "the process that ranks are forked from ended with exit code 7; no rank is left; it had not started yet"
    assert wanted in ended.stderr
    assert "KeyError" not in ended.stderr


@pytest.mark.slow
@NAMESPACES
def test_a_loopback_interface_that_is_down_is_reported() -> None:
    ended = run(*ELSEWHERE, "--net", *LAUNCH, "true")
    assert ended.returncode == 1
    assert ended.stderr.startswith("rankwise: this process cannot reach its own port")
    assert "Network is unreachable" in ended.stderr


@pytest.mark.parametrize("most", variants([10, 12, 14, 16], slow=[12]))
def test_a_lack_of_descriptors_is_reported(most: int) -> None:
    ended = run(*LAUNCH, "true", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.match("rankwise: .*Too many open files.* raise ulimit -n", line)


@pytest.mark.parametrize("most", variants([24, 40], slow=[24]))
def test_a_lack_of_descriptors_for_ranks_is_reported(most: int) -> None:
    limit = most, most
    ended = run(*LAUNCH, "-n", "6", "true", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.match("rankwise: (the ranks|rank [0-5]) cannot be started here: Too many open files", last)
    assert f"a process may open {most} files" in last
    assert "Traceback" not in ended.stderr


@pytest.fixture
def process_limit() -> Iterator[Path]:
    """A control group of a test's own."""
    group = next(filter(Path.is_dir, (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")))) / f"test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no right to make control groups")
    try:
        if not (group / "pids.max").exists():
            pytest.skip("control groups here do not count processes")
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_lack_of_processes_is_reported(process_limit: Path) -> None:
    (process_limit / "pids.max").write_text("6")
    enter = f'echo $$ > {process_limit}/cgroup.procs && exec "$@"'
    ended = run("sh", "-c", enter, "sh", *LAUNCH, "-n", "6", "sleep", "1")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.match("rankwise: (the ranks|rank [0-5]) cannot be started here: ", last)
    assert "may have no more processes and threads: start fewer ranks" in last
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@NAMESPACES
def test_ranks_start_where_no_file_can_be_written() -> None:
    read_only = " && ".join(f"mount -t tmpfs -o ro none {folder}" for folder in ("/tmp", "/var/tmp", "/dev/shm"))
    ended = run(*ELSEWHERE, "--mount", "sh", "-c", f'{read_only} && exec "$@"', "sh", *LAUNCH, "true", TMPDIR="/tmp")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
@NAMESPACES
def test_ranks_start_and_end_where_there_is_no_proc() -> None:
    ended = run_without_proc(*LAUNCH, "sh", "-c", "sleep 50 >&- 2>&- & echo $!")
    assert (ended.returncode, ended.stderr) == (0, "")
    left = [int(line.split()[1]) for line in ended.stdout.splitlines()]
    assert len(left) == 2
    deadline = time.monotonic() + 200
    while any(map(psutil.pid_exists, left)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.rare
@NAMESPACES
def test_ranks_of_python_say_that_there_is_no_proc(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    ended = run_without_proc(RANKWISE, "launch", "-n", "2", str(tmp_path / "train.py"))
    assert ended.returncode == 1
    assert ended.stderr.startswith("rankwise: ranks of Python use /proc, which is missing here: mount it")
    assert ended.stderr.count("\n") == 1
    ended = run_without_proc(*PYTEST, str(PROGRAM))
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: ranks of Python use /proc, which is missing here: mount it" in ended.stderr
    with_xdist = run_without_proc(*PYTEST, "-n", "1", str(PROGRAM))
    assert "ERROR at setup of test_in_ranks" in with_xdist.stdout
    assert "\nranks of Python use /proc, which is missing here: mount it" in with_xdist.stdout
    assert "2 passed, 1 error" in with_xdist.stdout
    assert "Traceback" not in ended.stdout + ended.stderr + with_xdist.stdout + with_xdist.stderr


def run_without_proc(*command: str) -> subprocess.CompletedProcess[str]:
    shell = 'mount -t tmpfs none /proc && exec "$@"'
    return run(*ELSEWHERE, "--mount", "sh", "-c", shell, "sh", *command)


@pytest.mark.slow
@NAMESPACES
def test_the_name_of_the_host_is_not_resolved() -> None:
    script = 'hostname "$0" && exec "$@"'
    ended = run(*ELSEWHERE, "--uts", "sh", "-c", script, LONG_NAME, *LAUNCH, "hostname")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] {LONG_NAME}" for rank in range(2)]


@pytest.mark.parametrize(("nproc", "number"), [("2", signal.SIGINT), ("2", signal.SIGTERM), ("auto", signal.SIGINT)])
def test_a_signal_while_the_launcher_imports_torch_is_not_lost(nproc: str, number: int, tmp_path: Path) -> None:
    """torch imports numpy in compiled code, which drops the exception of the handler."""
    marker = tmp_path / "imported"
    (tmp_path / "numpy.py").write_text(
        "import os, pathlib\n"
        f"if 'RANKWISE_LAUNCH' not in os.environ and not os.path.exists({str(marker)!r}):\n"
        f"    pathlib.Path({str(marker)!r}).touch()\n"
        f"    os.kill(os.getpid(), {number})\n"
    )
    ended = run(RANKWISE, "launch", "-n", nproc, "--no-python", "sleep", "1000", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, marker.exists()) == (128 + number, True)
    assert "Traceback" not in ended.stderr
