"""`rankwise logs` for launches of this host: which launch and attempt, the order of lines, and the end of following."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.session.worlds import clean_environ

RANKWISE = [sys.executable, "-m", "rankwise"]
TALK = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("begin", attempt, flush=True)
while not os.path.exists(sys.argv[1] + attempt):
    time.sleep(0.01)
print("half", end="", flush=True)
time.sleep(0.3)
print(" of", rank, flush=True)
sys.exit(3 if attempt == "0" and rank == "1" else 0)
"""


def logs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RANKWISE, "logs", *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_following_shows_each_attempt_until_the_launch_has_ended(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    folder, go = tmp_path / "logs", str(tmp_path / "go")
    options = ["-n", "2", "--max-restarts", "1", "--log-dir", str(folder), "--log-times"]
    launch = [*RANKWISE, "launch", *options, str(tmp_path / "talk.py"), go]
    with subprocess.Popen(
        launch, env=clean_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launched:
        while not (folder / "latest").exists() and launched.poll() is None:
            time.sleep(0.01)
        with subprocess.Popen(
            [*RANKWISE, "logs", "-f", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as follower:
            assert follower.stdout is not None
            assert follower.stderr is not None
            seen = [follower.stdout.readline(), follower.stdout.readline()]
            assert [line.split()[-2:] for line in seen] == [["begin", "0"]] * 2
            assert follower.poll() is None
            Path(f"{go}0").touch()
            Path(f"{go}1").touch()
            seen += follower.stdout.readlines()
            assert follower.stderr.read() == "rankwise: attempt 1 begins\n"
        assert follower.returncode == 0
    assert launched.returncode == 0
    stamped = r"\[[01]\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (begin \d|half of \d|half)\n"
    assert [line for line in seen if not re.fullmatch(stamped, line)] == []
    last = logs(str(folder)).stdout.splitlines(keepends=True)
    assert sorted(last) == sorted(seen[-4:]), "those of the last attempt"
    assert last == sorted(last, key=lambda line: line[4:33]), "in the order of their times"
    one = logs("--rank", "1", str(folder))
    assert one.stdout == "".join(line for line in last if line.startswith("[1]"))


@pytest.mark.slow
def test_a_newer_launch_is_the_one_that_is_shown(tmp_path: Path) -> None:
    for text in ("older", "newer"):
        launch = [*RANKWISE, "launch", "--log-dir", str(tmp_path), "--no-python", "echo", text]
        subprocess.run(launch, env=clean_environ(), stdout=subprocess.DEVNULL, timeout=200, check=True)
    assert logs(str(tmp_path)).stdout == "[0] newer\n"
    newer = (tmp_path / "latest").resolve()
    (older,) = [path for path in tmp_path.iterdir() if not path.is_symlink() and path != newer]
    assert logs(str(older)).stdout == "[0] older\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["none"], "'none' is neither the id of a job, nor a folder"), (["--rank", "4", "{}"], "has no output of rank 4")],
)
def test_what_is_not_there_is_an_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    rank = tmp_path / "run_1" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (tmp_path / "latest").symlink_to("run_1")
    ended = logs(*[argument.format(tmp_path) for argument in arguments])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
