"""Stop under launchers: signals to the launcher and to a rank reach all ranks, which have the time to save."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
PROGRAM = str(Path(__file__).parent / "programs" / "stop_and_save.py")
LAUNCHERS = {
    "rankwise": [str(BIN / "rankwise"), "launch", "-n", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
STATUS_AFTER_SIGTERM = {"rankwise": 128 + signal.SIGTERM, "torchrun": 1}
SECONDS = 200
# Which process of which launcher gets a signal.
TARGETS = [("rankwise", "launcher"), ("rankwise", "rank"), ("torchrun", "launcher"), ("torchrun", "rank")]


@contextmanager
def job(launcher: str, folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*LAUNCHERS[launcher], PROGRAM, *args], cwd=folder, env=clean_environ(TMPDIR=str(folder)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            read_until(process, "running")
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no {text!r}")


@pytest.mark.parametrize(("launcher", "target"), variants(TARGETS, fast=TARGETS[:2], slow=TARGETS[2:3]))
def test_all_ranks_stop_at_one_step_and_save(launcher: str, target: str, tmp_path: Path) -> None:
    with job(launcher, tmp_path) as process:
        pid = process.pid if target == "launcher" else int((tmp_path / "pid1").read_text())
        os.kill(pid, signal.SIGTERM if target == "launcher" else signal.SIGUSR1)
        output, _ = process.communicate(timeout=SECONDS)
    stops = re.findall(r"rank (\d) stopped at (\d+): rank (\d) received (\w+)", output)
    assert sorted(rank for rank, *_ in stops) == ["0", "1"], output
    assert len({tuple(rest) for _, *rest in stops}) == 1
    assert len(re.findall(r"rank \d saved", output)) == 2
    assert process.returncode == (0 if target == "rank" else STATUS_AFTER_SIGTERM[launcher])
    assert (stops[0][2], stops[0][3]) == ("1", "SIGUSR1") if target == "rank" else stops[0][3] == "SIGTERM"


@pytest.mark.rare
@pytest.mark.soak(7)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_signals_at_random_moments_to_a_rank(launcher: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)  # noqa: S311 - repeatable
    with job(launcher, tmp_path) as process:
        time.sleep(rng.random())
        number, rank = rng.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)), rng.randrange(2)
        os.kill(int((tmp_path / f"pid{rank}").read_text()), number)
        output, _ = process.communicate(timeout=SECONDS)
    check_stop(output, size=2, reason=f"rank {rank} received {number.name}")
    assert process.returncode == 0


def check_stop(output: str, *, size: int, reason: str) -> None:
    """Check that all ranks have stopped at one step, with one reason, and saved."""
    stops = re.findall(r"rank (\d) stopped at (\d+): (.*)", output)
    assert sorted(rank for rank, *_ in stops) == [str(rank) for rank in range(size)], output
    assert len({step for _, step, _ in stops}) == 1, output
    assert {found for *_, found in stops} == {reason}
    assert len(re.findall(r"rank \d saved", output)) == size


def test_a_second_signal_ends_a_rank_that_does_not_end(tmp_path: Path) -> None:
    with job("rankwise", tmp_path, "for-ever") as process:
        pid = int((tmp_path / "pid1").read_text())
        os.kill(pid, signal.SIGTERM)
        read_until(process, "stopped at")
        time.sleep(2.5)  # a signal that comes sooner is taken for the same request
        os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode != 0
        assert "rank 1" in output
        assert "SIGTERM" in output
