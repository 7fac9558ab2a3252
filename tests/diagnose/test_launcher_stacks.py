"""The stacks that a launcher takes of its ranks: when it is asked for them, and before it kills them."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.errors import RankFailedError
from tests.lanes import variants
from tests.session.worlds import clean_environ

PROGRAM = str(Path(__file__).parent / "programs" / "ends.py")
RANKWISE = str(Path(sys.executable).with_name("rankwise"))
LAUNCH = [RANKWISE, "launch", "-n", "2"]
SECONDS = 200
# What makes a rank fail, and what the other does, which is killed then.
KILLED = [("times out", "waits"), ("fails", "stays")]


def test_ctrl_backslash_prints_the_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    end = tmp_path / "end"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(RANKWISE, [*LAUNCH, PROGRAM, str(end), "waits", "waits"], clean_environ())  # noqa: S606 - the command
    shown = _read(terminal, "up", 2)
    os.write(terminal, b"\x1c")
    shown += _read(terminal, 'ends.py", line', 2)
    end.touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert "rankwise: stacks of ranks 0-1 on " in shown
    assert "ranks 0-1: sleep at ends.py:" in shown


def _read(terminal: int, text: str, count: int) -> str:
    shown = ""
    while shown.count(text) < count:
        shown += os.read(terminal, 1000).decode(errors="replace")
    return shown


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--no-preload",), marks=pytest.mark.rare),
        pytest.param(("--no-python",), marks=pytest.mark.slow),
    ],
)
def test_sigquit_without_a_terminal_does_the_same(tmp_path: Path, flags: tuple[str, ...]) -> None:
    end, reports = tmp_path / "end", tmp_path / "reports"
    target = ["sh", "-c", '"$@"; :', "sh", sys.executable, PROGRAM] if "--no-python" in flags else [PROGRAM]
    with subprocess.Popen(
        [*LAUNCH, *flags, "--hang-dir", str(reports), *target, str(end), "waits", "waits"],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
        launcher.send_signal(signal.SIGQUIT)
        shown = ""
        while "this report is in" not in shown:
            line = launcher.stderr.readline()
            assert line, shown
            shown += line
        end.touch()
        assert launcher.communicate(timeout=SECONDS) == ("", "")
    assert launcher.returncode == 0
    (file,) = reports.iterdir()
    assert re.fullmatch(r"stacks-.*-rank0-\d+T\d+-[0-9a-f]{8}\.txt", file.name)
    assert file.read_text() in shown
    assert "ranks 0-1: sleep at ends.py:" in shown


def run(folder: Path, *how: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *flags, PROGRAM, str(folder / "end"), *how],
        env=clean_environ(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("failure", "other"), variants(KILLED, slow=KILLED[:1]))
def test_stacks_of_ranks_that_are_killed_are_reported(tmp_path: Path, failure: str, other: str) -> None:
    ended = run(tmp_path, failure, other, flags=("--hang-dir", str(tmp_path / "reports")))
    assert ended.returncode == 1
    assert "stacks of rank 1 before the end:\nrank 1: " in ended.stderr
    assert re.search(r'ends.py", line \d+ in wait', ended.stderr)
    (file,) = (tmp_path / "reports").iterdir()
    assert re.fullmatch(r"killed-.*-rank1-\d+T\d+-[0-9a-f]{8}\.txt", file.name)
    assert file.read_text() in ended.stderr


@pytest.mark.slow
def test_an_ordinary_failure_has_no_stacks_and_a_bad_folder_is_named(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    ended = run(tmp_path, "fails", "waits", flags=("--hang-dir", str(reports)))
    assert "ValueError: no data" in ended.stderr
    assert "stacks of" not in ended.stderr
    assert not reports.exists()
    reports.touch()
    (tmp_path / "end.up1").unlink()
    ended = run(tmp_path, "times out", "waits", flags=("--hang-dir", str(reports)))
    assert ended.returncode == 1
    assert re.search(
        f"this report could not be written to {reports}/killed-.*: (Not a directory|File exists)", ended.stderr
    )


def _fail_by_timeout() -> None:
    if rw.get_rank() == 0:
        raise TimeoutError("rank 1 did not come")
    signal.pause()


@pytest.mark.slow
def test_the_error_of_a_function_has_the_stacks_too() -> None:
    with pytest.raises(RankFailedError, match="stacks of rank 1 before the end:\nrank 1: pause at test_launcher_st"):
        rw.launch(_fail_by_timeout, nproc=2)
