"""Engines: how they are found, what is refused, and jobs of an engine that runs its ranks on this host."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise._launch.engines import slurm_files
from rankwise._launch.engines.slurm_time import minutes_of
from rankwise._launch.forkserver.ipc import TargetKind
from rankwise.extend.engines import RankChild, RankJob, RankOutcome
from rankwise.launching import Output, RayEngine, SlurmEngine, launch_many
from tests.session.worlds import clean_environ, free_port


class ThisHost:
    """An engine that runs ranks on this host. They do not join: each is a world of its own."""

    name = "this-host"

    def __init__(self) -> None:
        self.jobs: dict[str, list[RankChild]] = {}

    def submit(self, jobs: Sequence[RankJob]) -> list[str]:
        for job in jobs:
            self.jobs[str(len(self.jobs))] = [
                RankChild(job, rank, {**os.environ, "NUMBER": str(rank)}) for rank in range(job.world_size)
            ]
        return list(self.jobs)

    def wait(self, job_id: str) -> list[RankOutcome]:
        return [child.wait() for child in self.jobs[job_id]]

    def cancel(self, job_id: str) -> None:
        for child in self.jobs[job_id]:
            child.send_signal(signal.SIGKILL)

    def logs(self, job_id: str) -> Mapping[int, Sequence[Path]]:
        return {0: [Path(f"{job_id}.log")]}


def number(base: int) -> int:
    return base + int(os.environ["NUMBER"])


def refused() -> list[str]:
    errors = []
    for call in (breakpoint, input, sys.stdin.read):
        try:
            call()
        except rw.LaunchError as error:
            errors.append(str(error))
    return errors


def end(how: str) -> None:
    if os.environ["NUMBER"] == "1":
        if how == "raise":
            raise KeyError("none")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)


def test_results_are_by_rank_and_by_launch() -> None:
    assert launch_many(number, [(10,), (20,)], nproc=2, on=ThisHost()) == [[10, 11], [20, 21]]


def test_a_rank_has_no_terminal() -> None:
    (errors,) = rw.launch(refused, nproc=1, on=ThisHost())
    assert ["breakpoint() needs a terminal" in errors[0], *("no standard input" in each for each in errors[1:])] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("how", "exitcode", "message"),
    [("raise", 1, "raised KeyError: 'none'"), ("kill", -9, "killed by SIGKILL"), ("exit", 0, "without returning")],
)
def test_a_failure_is_that_of_a_launch(how: str, exitcode: int, message: str) -> None:
    with pytest.raises(rw.RankFailedError, match=message) as caught:
        rw.launch(end, how, nproc=2, on=ThisHost())
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert isinstance(caught.value.__cause__, KeyError) is (how == "raise")


@pytest.mark.slow
def test_a_script_that_raises_in_its_session_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It tells what has started it first that it leaves the others."""
    script = tmp_path / "script.py"
    script.write_text("import rankwise as rw\nwith rw.init(timeout=100):\n    raise KeyError(rw.get_rank())\n")
    job = RankJob(nproc=2, nnodes=1, name="script", kind=TargetKind.SCRIPT, argv=(str(script),))
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [RankChild(job, rank, clean_environ(RANK=str(rank), LOCAL_RANK=str(rank), **world)) for rank in range(2)]
    failures = [child.wait().failure for child in children]
    assert [failure and failure.raised for failure in failures] == ["KeyError: 0", "KeyError: 1"]
    assert not any(child.returned for child in children)
    assert "rank 1 of 2 leaves with KeyError: 1" in capfd.readouterr().err


def test_ctrl_c_cancels() -> None:
    engine = ThisHost()

    def interrupt(job_id: str) -> list[RankOutcome]:
        assert job_id == "0"
        raise KeyboardInterrupt

    engine.wait = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rw.launch(input, nproc=1, on=engine)
    assert [child.wait().failure.exitcode for child in engine.jobs["0"]] in ([-9], [1])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "pbs"}, "is not an engine; there are ray, slurm"),
        ({"on": ThisHost}, "is not an engine"),
        ({"on": "slurm", "output": Output()}, "output= and on= exclude each other"),
        ({"on": "slurm", "preload": "numpy"}, "preload= and on= exclude each other"),
        ({"on": "slurm", "backend": "xla"}, "backend= and on= exclude each other"),
        ({"nnodes": 2}, "needs on="),
        ({"on": ThisHost(), "nnodes": 0}, "nnodes=0"),
    ],
)
def test_what_no_engine_has_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=message):
        rw.launch(number, 1, nproc=1, **arguments)


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_without_its_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module == package else find(module))
    with pytest.raises(rw.MissingDependencyError, match=f"pip install {package}"):
        rw.launch(number, 1, nproc=1, on=name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlurmEngine(time="soon"), "is not a time limit"),
        (lambda: SlurmEngine(requeue=1), "needs the limit"),
        (lambda: SlurmEngine(gpus_per_task=-1), "below 0"),
        (lambda: RayEngine(cpus_per_rank=-1), "amount of CPU"),
        (lambda: SlurmEngine().cancel("1; rm"), "not the id of a job"),
    ],
)
def test_options_are_checked(make: Any, message: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=message):
        make()


def test_time_limits() -> None:
    assert [minutes_of(text) for text in ("90", 5, "0:30", "1:00:00", "2-0", "1-1:30")] == [90, 5, 1, 60, 2880, 1530]


def test_the_file_for_sbatch() -> None:
    job = RankJob(nproc=4, nnodes=2, name="train", kind=_script(), argv=("train.py",))
    text = SlurmEngine(time="1:00:00", requeue=2, gpus_per_task=1, options={"account": "vision"}).batch_file(job)
    for line in (
        "nodes=2",
        "ntasks-per-node=4",
        "time=60",
        "gpus-per-task=1",
        "account=vision",
        "requeue",
        "signal=USR2@90",
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "--kill-on-bad-exit=1" in text


def _script() -> Any:
    from rankwise._launch.forkserver.ipc import TargetKind  # noqa: PLC0415 - of one test

    return TargetKind.SCRIPT


def test_a_folder_of_jobs_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Its pickles run code when they are read: at the submission, and by whoever waits for the job."""
    own = tmp_path / "own"
    slurm_files.make_folder(own)
    assert own.stat().st_mode & 0o777 == 0o700
    (own / "7_size.json").write_text("{}")
    own.chmod(0o777)
    for use in (slurm_files.make_folder, lambda folder: slurm_files.read_size(folder, "7")):
        with pytest.raises(rw.LaunchError, match=r"has the mode 777, .*chmod go-w"):
            use(own)
    own.chmod(0o755)
    assert slurm_files.read_size(own, "7") == {}
    if os.geteuid() == 0:
        os.chown(own, 2002, 2002)
        with pytest.raises(rw.LaunchError, match="belongs to user 2002"):
            slurm_files.make_folder(own)


def test_what_sbatch_refuses_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, script in (("sbatch", "echo 'no such partition' >&2; exit 1"), ("srun", "echo slurm 24.05")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(rw.LaunchError, match=r"^sbatch has refused the job: no such partition$"):
        rw.launch(number, 1, nproc=1, on=SlurmEngine(folder=str(tmp_path / "jobs")))
    assert capfd.readouterr() == ("", "")
