"""Nothing is left of a world two seconds after any end of it: no rank, no descendant of one, no file."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import rankwise as rw
from rankwise._launch.reaper import LAUNCH_ID
from tests.lanes import variants
from tests.session.worlds import clean_environ

PROGRAM = str(Path(__file__).parent / "programs" / "stay.py")
LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "3"]
SHARED_MEMORY = Path("/dev/shm")
LEFT_SECONDS = 100.0


def server(launcher: psutil.Process) -> psutil.Process:
    (found,) = launcher.children()
    return found


def twice(launcher: psutil.Process) -> None:
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)


def kill_both(launcher: psutil.Process) -> None:
    launcher.suspend()
    server(launcher).kill()
    launcher.kill()


ENDS: dict[str, tuple[Callable[[psutil.Process], None], int]] = {
    "SIGTERM": (lambda launcher: launcher.terminate(), 143),
    "SIGHUP": (lambda launcher: launcher.send_signal(signal.SIGHUP), 129),
    "Ctrl-C": (lambda launcher: launcher.send_signal(signal.SIGINT), 130),
    "Ctrl-C twice": (twice, 130),
    "SIGKILL": (lambda launcher: launcher.kill(), -9),
    "fork server SIGKILL": (lambda launcher: server(launcher).kill(), 1),
    "rank SIGKILL": (lambda launcher: server(launcher).children()[1].kill(), 137),
    "rank SIGSEGV": (lambda launcher: server(launcher).children()[1].send_signal(signal.SIGSEGV), 139),
}

FAST = {("rank SIGKILL", "rankwise")}
SLOW = {
    *(("SIGTERM", "C++"), ("Ctrl-C", "rankwise"), ("Ctrl-C twice", "C++")),
    *(("SIGKILL", "Python"), ("fork server SIGKILL", "Python"), ("rank SIGSEGV", "C++")),
}


class World:
    """A launcher, and everything that it started: with `before`, not as scripts of Python."""

    def __init__(self, folder: Path, how: str, *before: str) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self.launcher = subprocess.Popen(
            [*LAUNCH, *before, PROGRAM, str(folder), how],
            env=clean_environ(TMPDIR=str(folder / "tmp")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def up(self) -> psutil.Process:
        """Wait until all ranks stay, and return the launcher."""
        assert self.launcher.stdout is not None
        lines = [self.launcher.stdout.readline() for _ in range(3)]
        assert sorted(lines) == [f"[{rank}] up\n" for rank in range(3)], self.launcher.communicate()
        time.sleep(0.2)
        return psutil.Process(self.launcher.pid)

    def is_gone(self, num_shared: int = 6, *, kills_services: bool = False) -> str:
        """Wait for the end of the launcher and of all other processes, and return the launcher's standard error."""
        _, stderr = self.launcher.communicate(timeout=200)
        ranks = [tuple(map(int, file.read_text().split())) for file in self.folder.glob("*.pids")]
        if kills_services:
            for _, service in ranks:
                os.kill(service, signal.SIGKILL)  # or an error: it is there
        pids = list(itertools.chain.from_iterable(ranks))
        assert len(pids) == 6
        deadline = time.monotonic() + LEFT_SECONDS
        while left := [*filter(psutil.pid_exists, pids), *marked(self.folder), *self._left_files(num_shared)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        return stderr

    def _left_files(self, num_shared: int) -> list[Path]:
        shared = [SHARED_MEMORY / word for file in self.folder.glob("*.shared") for word in file.read_text().split()]
        assert len(shared) == num_shared
        return [*(self.folder / "tmp").iterdir(), *(path for path in shared if path.exists())]


def marked(folder: Path) -> list[psutil.Process]:
    """Return the processes of a world's launcher: other launchers have other folders, as the one of tests in ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            ours = LAUNCH_ID in environ and environ.get("TMPDIR") == str(folder / "tmp")
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("end", "how"), variants(itertools.product(ENDS, ["Python", "C++", "rankwise"]), fast=FAST, slow=SLOW)
)
def test_nothing_is_left_of_ranks_that_stay(end: str, how: str, tmp_path: Path) -> None:
    world = World(tmp_path, how)
    act, status = ENDS[end]
    launcher = world.up()
    act(launcher)
    stderr = world.is_gone()
    assert world.launcher.returncode == status, stderr
    if end == "fork server SIGKILL":
        assert "was killed by SIGKILL; no rank is left" in stderr
    if end.startswith("rank"):
        assert f"rankwise: rank 1 of 3 on {os.uname().nodename} was killed by {end[5:]}" in stderr
    assert "_launch/attempts.py" not in stderr, "no traceback of the launcher's own"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 1)])
def test_nothing_is_left_of_ranks_that_end(how: str, status: int, tmp_path: Path) -> None:
    """But what they have started in sessions of its own, if they end normally."""
    world = World(tmp_path, how)
    stderr = world.is_gone(kills_services=status == 0)
    assert world.launcher.returncode == status, stderr


@pytest.mark.slow
def test_a_service_outlives_a_normal_end_and_other_processes_do_not(tmp_path: Path) -> None:
    """Also where the ranks are functions of a program, and the service has inherited the id of the launch."""

    def leave(fails: bool) -> tuple[int, int]:
        worker = subprocess.Popen(["sleep", "300"])
        service = subprocess.Popen(["sleep", "300"], start_new_session=True)
        with (tmp_path / "pids").open("a") as file:
            file.write(f"{worker.pid} {service.pid}\n")
        if fails:
            raise ValueError
        return worker.pid, service.pid

    for worker, service in rw.launch(leave, False, nproc=2):
        assert not psutil.pid_exists(worker)
        os.kill(service, signal.SIGKILL)
    with pytest.raises(rw.RankFailedError):
        rw.launch(leave, True, nproc=1)
    *_, last = (tmp_path / "pids").read_text().splitlines()
    assert not any(psutil.pid_exists(int(pid)) for pid in last.split())


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; its parent, who may be anybody, need not have waited for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_id_of_a_launch_counts_only_for_its_kin() -> None:
    """A job that a rank submits inherits the id; it is in another step, and often another cgroup."""
    environ = {**os.environ, LAUNCH_ID: "kin", "SLURM_JOB_ID": "1"}
    daemon = "import os, subprocess\nprint(subprocess.Popen(['sleep', '300'], stdout=-3, start_new_session=True).pid)"

    def orphan(**variables: str) -> psutil.Process:
        started = subprocess.run(
            [sys.executable, "-c", daemon], env=environ | variables, stdout=subprocess.PIPE, text=True, check=True
        )  # fmt: skip
        return psutil.Process(int(started.stdout))

    of_rank, submitted, other = orphan(), orphan(SLURM_JOB_ID="2"), orphan(**{LAUNCH_ID: "another"})
    try:
        kill = "from rankwise._launch.reaper import kill_launch\nkill_launch('kin', keeps_services={})"
        subprocess.run([sys.executable, "-c", kill.format(True)], env=environ, check=True)
        assert not has_ended(of_rank)
        subprocess.run([sys.executable, "-c", kill.format(False)], env=environ, check=True)
        deadline = time.monotonic() + LEFT_SECONDS
        while not has_ended(of_rank):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [has_ended(one) for one in (of_rank, submitted, other)] == [True, False, False]
    finally:
        for one in (of_rank, submitted, other):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        pytest.param((), id="script"),
        pytest.param(("--no-python", sys.executable), id="program", marks=pytest.mark.rare),
    ],
)
def test_ranks_that_do_not_listen_are_killed(before: tuple[str, ...], tmp_path: Path) -> None:
    world = World(tmp_path, "deaf", *before)
    twice(world.up())
    world.is_gone(num_shared=9)
    assert world.launcher.returncode == 130


@pytest.mark.slow
def test_ranks_are_gone_when_launcher_and_fork_server_are_killed_at_once(tmp_path: Path) -> None:
    """Their children may stay: no process is left that knows them."""
    world = World(tmp_path, "C++")
    launcher = world.up()
    kill_both(launcher)
    world.launcher.communicate(timeout=100)
    pids = [[int(word) for word in file.read_text().split()] for file in tmp_path.glob("*.pids")]
    deadline = time.monotonic() + LEFT_SECONDS
    while left := [rank for rank, _ in pids if psutil.pid_exists(rank)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    for _, child in pids:
        if psutil.pid_exists(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_fork_server_that_was_stopped_still_ends_its_ranks_as_they_wish(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(
        "import time\nprint('up', flush=True)\n"
        "try:\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    print('saved', flush=True)\n"
    )
    with subprocess.Popen(
        [*LAUNCH, str(script)], env=clean_environ(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        assert {launcher.stdout.readline().split()[1] for _ in range(3)} == {"up"}
        time.sleep(0.3)
        server(psutil.Process(launcher.pid)).suspend()
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.read().count("saved") == 3
    assert launcher.returncode == 130
