"""`launch(on="slurm")` and `rankwise submit` on a real Slurm of four nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "programs" / "on_engine.py")


def environ(cluster: Mapping[str, str], folder: Path) -> dict[str, str]:
    # The nodes are on one machine, and their names do not resolve.
    return clean_environ(**cluster, MASTER_ADDR="127.0.0.1", TMPDIR=str(folder))


def run(cluster: Mapping[str, str], folder: Path, *words: str) -> Any:
    command = [sys.executable, PROGRAM, "slurm", *words]
    ended = subprocess.run(
        command, cwd=folder, env=environ(cluster, folder), capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def slurm(cluster: Mapping[str, str], *command: str) -> str:
    return subprocess.run(
        command, env=clean_environ(**cluster), capture_output=True, text=True, timeout=100, check=True
    ).stdout


def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + 150
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def started(folder: Path) -> list[int]:
    """Return the process ids of the ranks of `run_until_killed`, when all are there."""
    until(lambda: len(list(folder.glob("*.*"))) == 4)
    return [int(path.suffix[1:]) for path in folder.glob("*.*")]


def test_the_numbers_are_those_of_a_launch_on_this_host(cluster: dict[str, str], tmp_path: Path) -> None:
    here = subprocess.run(
        [sys.executable, PROGRAM, "none", "digits"],
        env=environ({}, tmp_path), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert run(cluster, tmp_path, "digits") == json.loads(here.stdout.splitlines()[-1])


FAILURES = [
    ("raise", 1, "rank 2 of 4 on node1 raised ValueError: no data"),
    ("kill", -signal.SIGKILL, "rank 2 of 4 on node1 was killed by SIGKILL"),
]


@pytest.mark.parametrize(
    ("how", "exitcode", "message"),
    variants(FAILURES, slow=FAILURES[1:]),
)
def test_a_rank_fails(cluster: dict[str, str], tmp_path: Path, how: str, exitcode: int, message: str) -> None:
    error = run(cluster, tmp_path, how)
    assert (error["kind"], error["rank"], error["host"]) == ("RankFailedError", 2, "node1")
    assert error["exitcode"] == exitcode
    assert message in error["message"]
    assert "_2_log.err" in error["message"]
    if how == "raise":
        assert error["cause"] == "ValueError('no data')"
        assert 'raise ValueError("no data")' in error["traceback"]
    until(lambda: not slurm(cluster, "squeue", "-h"))


def start(
    cluster: Mapping[str, str], folder: Path, mode: str = "wait", *words: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start ranks that wait, and return the launching process and their processes."""
    (folder / "ranks").mkdir()
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "slurm", mode, str(folder / "ranks"), *words],
        cwd=folder, env=environ(cluster, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, started(folder / "ranks")


def test_ctrl_c_cancels_the_job(cluster: dict[str, str], tmp_path: Path) -> None:
    process, ranks = start(cluster, tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "KeyboardInterrupt" in errors
    until(lambda: not slurm(cluster, "squeue", "-h"))
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.rare
def test_a_job_that_cannot_be_recorded_is_cancelled(cluster: dict[str, str], tmp_path: Path) -> None:
    error = run(cluster, tmp_path, "full disk", str(tmp_path))
    assert (error["kind"], "No space left" in error["message"]) == ("OSError", True)
    until(lambda: not slurm(cluster, "squeue", "-h"))


def test_another_cancels_the_job(cluster: dict[str, str], tmp_path: Path) -> None:
    process, ranks = start(cluster, tmp_path)
    job = slurm(cluster, "squeue", "-h", "-o", "%i").strip()
    slurm(cluster, sys.executable, "-m", "rankwise", "cancel", job)
    out, _ = process.communicate(timeout=100)
    error = json.loads(out)
    assert error["kind"] == "RankFailedError"
    assert "was stopped (SIGTERM)" in error["message"] or "Slurm ended the job with CANCELLED" in error["message"]
    until(lambda: not any(map(psutil.pid_exists, ranks)))


@pytest.mark.rare
def test_a_node_is_drained_and_then_goes_down(cluster: dict[str, str], tmp_path: Path) -> None:
    process, ranks = start(cluster, tmp_path)
    try:
        slurm(cluster, "scontrol", "update", "nodename=node1", "state=drain", "reason=test")
        assert process.poll() is None  # a drained node ends its jobs first
        slurm(cluster, "scontrol", "update", "nodename=node1", "state=down", "reason=test")
        out, errors = process.communicate(timeout=100)
        error = json.loads(out)
    finally:
        slurm(cluster, "scontrol", "update", "nodename=node1", "state=resume")
    assert (error["kind"], error["host"]) == ("RankFailedError", "node1"), errors
    assert "node1" in error["message"]
    until(lambda: not slurm(cluster, "squeue", "-h"))
    until(lambda: not any(map(psutil.pid_exists, ranks)))


@pytest.mark.rare
def test_a_job_is_requeued_after_the_signal_before_its_limit(cluster: dict[str, str], tmp_path: Path) -> None:
    process, _ = start(cluster, tmp_path, "requeue")
    slurm(cluster, "scancel", "--signal=USR2", slurm(cluster, "squeue", "-h", "-o", "%i").strip())
    out, errors = process.communicate(timeout=200)
    assert json.loads(out) == [[rank, 1] for rank in range(4)], errors


@pytest.mark.parametrize("reason", variants(["signal", "limit"], slow=["signal"]))
def test_a_job_is_requeued_whose_ranks_have_stopped_and_returned(
    cluster: dict[str, str], tmp_path: Path, reason: str
) -> None:
    """By `rw.Stop`, after the signal before the limit, or shortly before it; they go on from their checkpoint."""
    process, _ = start(cluster, tmp_path, "requeue", reason)
    slurm(cluster, "scancel", "--signal=USR2", slurm(cluster, "squeue", "-h", "-o", "%i").strip())
    out, errors = process.communicate(timeout=200)
    results = json.loads(out)
    assert [result[:2] for result in results] == [[rank, 1] for rank in range(4)], errors
    (text,) = {result[2] for result in results}
    assert ("received SIGUSR2" if reason == "signal" else "came to its time limit") in text


def test_jobs_that_ranks_of_an_array_submit_are_jobs_of_their_own(cluster: dict[str, str], tmp_path: Path) -> None:
    """They get the environment of the caller, but nothing of its job; and they outlive the ranks."""
    assert run(cluster, tmp_path, "array") == [[0], [1]]
    until(lambda: len(list(tmp_path.glob("evaluated.*"))) == 2)
    assert {path.read_text() for path in tmp_path.glob("evaluated.*")} == {"[] yes"}
    (tmp_path / "go").touch()
    until(lambda: len(list(tmp_path.glob("outlived.*"))) == 2)
    until(lambda: not slurm(cluster, "squeue", "-h"))
    assert len(list(tmp_path.glob("trained.*"))) == 2, "no job has run the function of another"


def test_a_script_is_submitted_and_its_output_followed(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys\nprint(os.environ['SLURM_PROCID'], sys.argv[1:])\n")
    options = ("--nnodes", "2", "-n", "2", "--time", "5", "--epochs", "3")
    submitted = command(cluster, tmp_path, "submit", "script.py", *options).stdout
    job = submitted.partition(":")[0].removeprefix("job ")
    assert f"follow: rankwise logs -f {job}" in submitted
    followed = command(cluster, tmp_path, "logs", "-f", job)
    assert followed.returncode == 0, followed.stderr
    lines = {line for line in followed.stdout.splitlines() if "submitit" not in line}
    assert lines == {f"[{rank}] {rank} ['--epochs', '3']" for rank in range(4)}


def test_the_failure_of_a_submitted_script_is_reported(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import os\nif os.environ['SLURM_PROCID'] == '1':\n    raise KeyError('x')\n")
    job = command(cluster, tmp_path, "submit", "fails.py", "-n", "2").stdout.partition(":")[0].removeprefix("job ")
    followed = command(cluster, tmp_path, "logs", "-f", job)
    assert followed.returncode == 1
    assert "rankwise: rank 1 of 2 on node0 raised KeyError: 'x'" in followed.stderr
    assert "[1]     raise KeyError('x')" in followed.stderr, "the log of the rank has its traceback"
    cancelled = command(cluster, tmp_path, "cancel", job)
    assert (cancelled.returncode, cancelled.stderr) == (
        1,
        f"rankwise: job {job} has ended, or is not one of this cluster\n",
    )


def command(cluster: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankwise", *words],
        cwd=folder, env=environ(cluster, folder), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
