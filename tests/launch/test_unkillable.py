"""Processes that SIGKILL does not end, as in a wait for a disk: they are named, and do not hold the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankwise._launch.reaper import _kill_all, wait_of
from tests.session.worlds import clean_environ

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]
PROGRAM = str(Path(__file__).parent / "programs" / "fail_beside.py")
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def frozen_group() -> Iterator[Path]:
    """A control group of version 1 that is frozen: its processes are in state D, and get no signal."""
    group = FREEZER / f"rankwise-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be frozen: {error}")
    (group / "freezer.state").write_text("FROZEN")
    try:
        yield group
    finally:
        pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        (group / "freezer.state").write_text("THAWED")
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=100)
        group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["failure", "SIGINT"])
def test_a_rank_in_state_d_is_named_and_left(end: str, frozen_group: Path, tmp_path: Path) -> None:
    options = ["-n", "2", "--grace", "1", "--max-restarts", "2"]
    with subprocess.Popen(
        [*LAUNCH, *options, "--no-prefix", PROGRAM, str(tmp_path / "fail")],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        (frozen_group / "cgroup.procs").write_text(str(pid))
        if end == "failure":
            (tmp_path / "fail").touch()
        else:
            launcher.send_signal(signal.SIGINT)
        errors = launcher.communicate(timeout=200)[1]
    assert launcher.returncode == {"failure": 1, "SIGINT": 130}[end]
    assert f"rankwise: rank 1, process {pid}, is left: it did not end after SIGKILL (state D, in " in errors
    assert ("not restarted again: SIGKILL did not end all processes of the ranks" in errors) == (end == "failure")


def test_processes_that_do_not_end_are_returned() -> None:
    class Unkillable(psutil.Process):
        def kill(self) -> None:
            """Do nothing, as SIGKILL in such a wait."""

    own = Unkillable()
    assert _kill_all(lambda: [own]) == [own.pid]


def test_the_wait_of_a_process_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    assert wait_of(7, tmp_path) == ""
    folder.mkdir()
    (folder / "stat").write_text("7 (a) b) D 1 7 7 0")
    (folder / "wchan").write_text("rpc_wait_bit_killable")
    assert wait_of(7, tmp_path) == "state D, in rpc_wait_bit_killable"
    (folder / "wchan").write_text("0")
    assert wait_of(7, tmp_path).startswith("state D, in a place")
