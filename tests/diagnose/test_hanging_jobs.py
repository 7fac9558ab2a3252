"""The rank that a job waits for, in jobs of any launcher that never import rankwise."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise._diagnose.jobs import find_job
from tests.diagnose.jobs import Injection, hanging, named, place, rankwise, watch
from tests.lanes import variants

LAUNCHERS = ("torchrun", "accelerate", "openmpi", "mpich", "plain", "rankwise")
HOWS = ("loader", "stopped", "lock", "skips")
WITHOUT_PTRACE = str(Path(__file__).parent / "programs" / "without_ptrace.py")
NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def can_unshare() -> bool:
    """Return whether user namespaces can be made here."""
    return shutil.which("unshare") is not None and not subprocess.run([*NAMESPACES, "true"], check=False).returncode


@pytest.mark.soak(20)
@pytest.mark.parametrize("how", variants(HOWS, slow={"loader"}))
def test_a_rank_that_does_not_come_is_named(how: str, seed: int) -> None:
    injection = Injection.of_seed(seed, how, LAUNCHERS)
    with hanging(injection) as pid:
        output = watch(pid)
    assert named(output) == [injection.victim], f"{injection}\n{output}"
    assert place(how) in output


@pytest.mark.rare
@pytest.mark.skipif(not can_unshare(), reason="no user namespaces")
def test_a_job_in_a_container_of_this_host() -> None:
    injection = Injection(launcher="rankwise", victim=2, how="lock")
    with hanging(injection, prefix=NAMESPACES) as pid:
        output = watch(pid)
        without = watch(pid, prefix=(sys.executable, WITHOUT_PTRACE))
    for text in (output, without):
        assert named(text) == [2], text
        assert place("lock") in text


@pytest.mark.slow
def test_without_the_right_to_read_other_processes() -> None:
    """As under Yama: ranks of ours write their stacks; those of others are shown as the kernel shows them."""
    prefix = (sys.executable, WITHOUT_PTRACE)
    with hanging(Injection(launcher="rankwise", victim=1, how="lock")) as pid:
        output = watch(pid, prefix=prefix)
        assert named(output) == [1]
        assert place("lock") in output
    with hanging(Injection(launcher="plain", victim=1, how="loader")) as pid:
        output = rankwise("stacks", pid, prefix=prefix, status=1)
        assert "set kernel.yama.ptrace_scope=0" in output
        assert "state S, CPU " in output
        assert ", waits in " in output
        check_waiting_times(pid)


def check_waiting_times(pid: int) -> None:
    """Check what `rankwise ps` shows of a job whose second rank does not come."""
    job = find_job(pid)
    while True:
        output = rankwise("ps")
        lines = output[output.index(f"job {job.pid}: plain, 3 of 3 ranks here") :].splitlines()[2:5]
        if all(re.search(r"in a collective for \d+ s", lines[rank]) for rank in (0, 2)):
            break
    assert "running" in lines[1]
    assert place("loader") in lines[1]
    (found,) = json.loads(rankwise("ps", "--json", str(pid)))
    assert (found["pid"], found["launcher"], found["world_size"]) == (job.pid, "plain", 3)
    states = [(rank["rank"], rank["state"].partition(" for ")[0]) for rank in found["ranks"]]
    assert states == [(0, "in a collective"), (1, "running"), (2, "in a collective")]
    assert found["ranks"][1]["memory"] > 1 << 20
    assert place("loader") in found["ranks"][1]["where"]
