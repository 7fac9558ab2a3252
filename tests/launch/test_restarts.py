"""Ranks that are started again: the causes of all attempts, and when no other attempt follows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._launch.attempt_history import FailedAttempt, reason_to_give_up
from rankwise._launch.reported_steps import JOB_LIMIT, PROGRESS, ReportedSteps, own_place, report_stop, report_timeout
from rankwise.errors import RankFailure
from rankwise.launching import ScriptLaunch
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port
from tests.tables import each_row

PROGRAM = Path(__file__).parent / "programs" / "fail_by_attempt.py"
LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2"]


def attempt(step: int | None, raised: str = "ValueError", rank: int = 0) -> FailedAttempt:
    return FailedAttempt(
        failures=(RankFailure(rank=rank, host="h", exitcode=1, raised=raised),), world_size=2, step=step
    )


def test_an_error_has_the_causes_of_all_attempts() -> None:
    ends = "5:first 6:SIGKILL 7:third"
    with pytest.raises(rw.RankFailedError) as raised:
        ScriptLaunch(str(PROGRAM), [ends], nproc=2, max_restarts=2).run()
    error = raised.value
    assert [failures[0].exitcode for failures in error.attempts] == [1, -9, 1]
    assert [failures[0].raised for failures in error.attempts] == ["ValueError: first", "", "ValueError: third"]
    assert error.attempts[-1] == error.failures
    first, second = str(error).splitlines()[-2:]
    assert first.startswith("attempt 1 of 3 had failed before: rank 0 of 2 on ")
    assert first.endswith(" raised ValueError: first, at step 5")
    assert ", at step 6" in second


@pytest.mark.slow
def test_what_an_attempt_leaves_is_gone_before_the_next_one(tmp_path: Path) -> None:
    program = PROGRAM.with_name("leave_a_process.py")
    ended = subprocess.run(
        [*LAUNCH[:-1], "1", "--max-restarts", "1", str(program), str(tmp_path / "pid")],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.stdout == "gone\n", ended.stderr


PROGRESS_OF_ATTEMPTS = [
    ("8:a 8:a 9:return", 1, "not restarted again: attempts 1 and 2 failed in the same way, at step 8"),
    ("8:hang 9:hang 10:return", 0, "rank 1 then was stopped (SIGKILL)"),
    ("8:SIGKILL 8:SIGKILL", 137, "not restarted again: attempts 1 and 2 failed in the same way, at step 8"),
    ("8:a 7:b 8:c", 1, "attempts 2 and 3 did not get beyond step 8, which an earlier one reached"),
    ("8:a 7:b 9:c 10:return", 0, "attempt 3 of 6 failed"),
    (":a :a :a :a :a :a", 1, "attempt 5 of 6 had failed before"),
]


@pytest.mark.parametrize(("ends", "status", "wanted"), variants(PROGRESS_OF_ATTEMPTS, slow=PROGRESS_OF_ATTEMPTS[:2]))
def test_ranks_that_make_no_progress_are_not_restarted(ends: str, status: int, wanted: str) -> None:
    ended = subprocess.run(
        [*LAUNCH, "--max-restarts", "5", str(PROGRAM), ends],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == status, ended.stderr
    assert wanted in ended.stderr


@each_row(
    ("attempts", "wanted"),
    [
        ([attempt(8)], ""),
        ([attempt(8), attempt(8)], "failed in the same way, at step 8"),
        ([attempt(None), attempt(None), attempt(None)], ""),
        ([attempt(8), attempt(8, "KeyError")], ""),
        ([attempt(8), attempt(8, rank=1)], ""),
        ([attempt(8), attempt(None, "KeyError"), attempt(3)], "attempts 2 and 3 did not get beyond step 8"),
        ([attempt(8), attempt(3, "KeyError"), attempt(9)], ""),
        ([attempt(None), attempt(3), attempt(2)], ""),
    ],
)
def test_when_no_other_attempt_follows(attempts: list[FailedAttempt], wanted: str) -> None:
    reason = reason_to_give_up(attempts)
    assert wanted in reason
    assert bool(reason) == bool(wanted)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory")
def test_the_highest_step_is_taken_once_and_others_are_not_written() -> None:
    steps = ReportedSteps(2)
    variable = steps.variables(1)[PROGRESS]
    report = own_place(variable)
    assert report is not None
    for step in (0, 7, 3):
        report(step)
    report_timeout(variable, 2.5)
    report_stop(variable, JOB_LIMIT)
    assert (steps.longest_timeout(), steps.stopped_by()) == (2.5, JOB_LIMIT)
    assert [steps.take_highest(), steps.take_highest()] == [7, None]
    assert (steps.longest_timeout(), steps.stopped_by()) == (None, 0)
    process, descriptor, inode, _ = variable.split()
    assert own_place(f"{process} {descriptor} {int(inode) + 1} 0") is None, "another file"
    assert own_place(f"{process} {descriptor} {inode} 2") is None, "beyond the end"
    assert own_place("") is None
    steps.close()
    assert own_place(variable) is None


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True, 2**63])
def test_a_step_that_is_no_number_is_refused(step: object) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="step="):
        rw.report_progress(step)  # type: ignore[arg-type]


def test_restarts_of_the_launcher_and_of_slurm_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rw.restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert rw.restart_count() == 3
    monkeypatch.setenv("SLURM_RESTART_COUNT", "one")
    with pytest.raises(rw.LauncherEnvironmentError, match="SLURM_RESTART_COUNT"):
        rw.restart_count()


ENDS_OF_HOSTS = [("1:a 2:SIGKILL 3:c", 1), ("1:a 2:b 3:return", 0), ("1:a 1:a 3:return", 1)]


@pytest.mark.parametrize("backend", variants(["static", "c10d"], slow=["c10d"]))
@pytest.mark.parametrize(("ends", "status"), variants(ENDS_OF_HOSTS, slow=ENDS_OF_HOSTS[:1]))
def test_hosts_count_the_same_attempts_and_report_the_same_causes(backend: str, ends: str, status: int) -> None:
    meeting = ["--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    hosts = [
        subprocess.Popen(
            [*LAUNCH, *meeting, "--node-rank", str(host), "--max-restarts", "2", str(PROGRAM), ends],
            env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    reports = [host.communicate(timeout=200)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [status, status], reports
    for report in reports:
        assert "attempt 1 of 3 failed: rank 0 of 4 on " in report
        assert ("not restarted again: attempts 1 and 2 failed in the same way" in report) == (
            ends == "1:a 1:a 3:return"
        )
        if ends.endswith("c"):
            assert "rankwise: rank 0 of 4 on " in report
            assert "attempt 2 of 3 had failed before: rank 0 of 4 on " in report
