"""A rank that is lost while others wait for their devices: no exception can end that wait, and no timeout of ours."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

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
