"""`rankwise stacks` and `rankwise ps`, on real jobs of several launchers, most of which do not use rankwise."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankwise._diagnose import py_spy
from rankwise._diagnose.jobs import Job, find_job
from rankwise._diagnose.processes import DiagnosisError, command_of, wait_channel
from rankwise._diagnose.sampling import sample_process, sample_ranks
from tests.diagnose.jobs import rankwise
from tests.lanes import variants

ROOT = Path(__file__).parents[2]
BROKEN = ROOT / "examples" / "broken"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
RANKWISE = (sys.executable, "-m", "rankwise", "launch", "-n")


@contextlib.contextmanager
def started(script: Path | str, *launcher: str, nproc: int = 3, ready: str = "training") -> Iterator[int]:
    """Start a job, wait until all ranks have printed that text, and return the process id of the launcher."""
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        [*launcher, str(nproc), str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            printed = ""  # the lines of two ranks may become one
            while printed.count(ready) < (1 if ready == "trained" else nproc):
                printed += (line := process.stdout.readline())
                assert line, "the job has ended"
            yield process.pid
        finally:
            processes = psutil.Process(process.pid).children(recursive=True)
            for started_process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started_process.kill()
            process.kill()
            psutil.wait_procs(processes, timeout=60)


def line(script: str, text: str) -> str:
    """Return the place of a line: "train.py:88"."""
    lines = (BROKEN / script).read_text().splitlines()
    return f"{script}:{next(number for number, code in enumerate(lines, 1) if text in code)}"


LAUNCHERS = {"torchrun": TORCHRUN, "rankwise": RANKWISE}
CASES = [
    ("torchrun", "skips_collective.py", "trained", "all_reduce", "group=evaluation", "not moving"),
    ("torchrun", "stopped_rank.py", "training", "main", "SIGSTOP)", "not moving"),
    ("rankwise", "stuck_system_call.py", "training", "read_labels", "with open", "not moving"),
    ("rankwise", "slow_loader.py", "training", "__next__", "in DataLoader", "moving (slow, not stuck)"),
]


@pytest.mark.parametrize(
    ("launcher", "script", "ready", "function", "text", "how"), variants(CASES, fast=CASES[2:3], slow=CASES[3:])
)
def test_the_rank_that_the_others_wait_for_is_named(
    launcher: str, script: str, ready: str, function: str, text: str, how: str
) -> None:
    with started(BROKEN / script, *LAUNCHERS[launcher], ready=ready) as pid:
        output = rankwise("stacks", pid, "--watch", 6)
    named, *rest = output.splitlines()
    assert named.startswith("rank 1: apart from the others in "), output
    assert f", {how}, " in named
    # A function that is being called has no frame of its own if it is one of C.
    assert f"{function} at {line(script, text)}" in named or line(script, text) in named
    assert re.match("last sample: ranks? 0", rest[0])  # of all, if the slow one is in the collective too
    if script == "slow_loader.py":
        assert f"sleep at {line(script, 'time.sleep')}" in output  # its worker


@pytest.mark.slow
def test_ranks_that_share_a_core_are_named() -> None:
    with started(BROKEN / "shared_core.py", *TORCHRUN) as pid:
        output = rankwise("stacks", pid, "--watch", 8)
    assert "ranks 1-2 waited for a core" in output or "ranks 0-2 waited for a core" in output
    assert "they share cores" in output


def test_a_rank_of_ours_writes_its_stack_though_it_holds_the_lock_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(py_spy, "_program", lambda: None)
    with started(Path(__file__).parent / "programs" / "holds_lock.py", *RANKWISE, nproc=2, ready="ready") as pid:
        job = find_job(pid)
        assert (job.launcher, job.world_size, [rank.rank for rank in job.ranks]) == ("rankwise", 2, [0, 1])
        locations = [""]
        while not all(location.startswith("sleep") for location in locations):  # one is in print(), before its sleep
            locations = [sample.process.location for sample in sample_ranks(job.ranks)]
        assert locations == ["sleep at holds_lock.py:12", "sleep at holds_lock.py:11"]
        assert [rank.process.state for rank in find_job(pid).ranks] == ["S", "S"]  # it has changed nothing
        os.kill(job.ranks[1].process.pid, signal.SIGSTOP)
        while find_job(pid).ranks[1].process.state != "T":
            pass
        stopped = sample_process(job.ranks[1].process.pid)
        assert stopped.state == "T"
        assert stopped.stack is None
        assert "pip install py-spy" in stopped.reason
        assert stopped.location.startswith("stopped by a signal")


@pytest.mark.slow
def test_ps_lists_jobs_and_stacks_asks_which() -> None:
    with started(BROKEN / "stopped_rank.py", *RANKWISE, nproc=2) as pid, contextlib.ExitStack() as stack:
        output = rankwise("ps")
        job = find_job(pid)
        block = output[output.index(f"job {job.pid}: rankwise, 2 of 2 ranks here") :].splitlines()
        assert "stopped by a signal" in block[3]
        assert "stopped_rank.py:" in block[2]
        stack.enter_context(started(BROKEN / "stopped_rank.py", *RANKWISE, nproc=2))
        refused = rankwise("stacks", status=1)
        assert f"{job.pid} (rankwise, 2 ranks)" in refused
        assert f"job {job.pid}: rankwise" in rankwise("top", "--interval", "0.1", "--updates", 1)
    with pytest.raises(DiagnosisError, match="of a job was not found"):
        find_job(pid)


def test_a_refusal_of_the_kernel_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"  # this machine has no Yama; so py-spy says where there is one
    program.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(py_spy, "_program", lambda: str(program))
    with subprocess.Popen(["sleep", "100"]) as process:
        while "nanosleep" not in wait_channel(process.pid) or command_of(process.pid)[:1] != ["sleep"]:
            pass
        sample = sample_process(process.pid)
        process.kill()
    assert "kernel.yama.ptrace_scope=0" in sample.reason
    assert "nanosleep" in sample.location


def test_workers_and_launchers_are_no_ranks() -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(99)'])"
    )
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        job: Job = find_job(process.pid)
        children = psutil.Process(process.pid).children()
        try:
            assert (job.launcher, job.world_size) == ("plain", 2)
            assert [rank.process.pid for rank in job.ranks] == [process.pid]
            assert [worker.pid for worker in job.ranks[0].workers] == [child.pid for child in children]
        finally:
            for child in children:
                child.kill()
            process.kill()
