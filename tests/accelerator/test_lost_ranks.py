"""A rank that is lost while others wait for their devices: no exception can end that wait, and no timeout of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rankwise as rw
from tests.session.worlds import free_port, plain, run_ranks


@pytest.mark.parametrize("way", ["dies", "raises"])
def test_a_rank_that_waits_for_its_device_is_released(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", "1")
    port = free_port()
    environs = [plain(rank, 2, port, LOCAL_RANK=str(rank)) for rank in range(2)]
    program = Path(__file__).with_name("programs") / "waits_for_device.py"
    first, second = run_ranks(str(program), environs, way, fresh=True)
    assert first.returncode == 1
    assert first.stdout.startswith("the device: ")
    reason = "its connection closed" if way == "dies" else "failed with OSError: no space left"
    assert "barrier at waits_for_device.py" in first.stderr
    assert reason in first.stderr
    assert second.returncode == (-signal.SIGKILL if way == "dies" else 1)


def test_a_rank_that_ends_before_others_aborts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", "1")
    port = free_port()
    environs = [plain(rank, 2, port, LOCAL_RANK=str(rank)) for rank in range(2)]
    program = Path(__file__).with_name("programs") / "ends_early.py"
    for process in run_ranks(str(program), environs, fresh=True):
        assert process.returncode == 0
        assert "aborted" not in process.stderr


def test_a_rank_that_is_missing_is_shown_with_its_calls_that_were_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", "1")  # otherwise a rank waits in each call

    def loop() -> None:
        with rw.init(timeout=3, check=False) as session:
            x = torch.ones(2, device=session.device)
            for step in range(4):
                if step == 3 and session.rank == 1:
                    time.sleep(6)
                    raise ValueError("late")
                rw.all_reduce(x)
            rw.barrier()

    def run() -> str:
        try:
            loop()
        except (rw.RankwiseError, ValueError) as error:
            return str(error)
        return ""

    first, _second = rw.launch(run, nproc=2)
    assert "rank 1, which has made no call with check=True of this group yet (3 with check=False, and this" in first


def test_an_interrupted_rank_does_not_wait_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", "1")
    program = Path(__file__).with_name("programs") / "interrupted.py"
    with subprocess.Popen(
        [sys.executable, "-m", "rankwise", "launch", "-n", "2", str(program)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        waiting = 0
        while waiting < 2:
            line = process.stdout.readline()
            assert line
            waiting += "waits" in line
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted: the communication of this rank's device is aborted" in output
