"""A restart waits for the memory of accelerators, which a driver may release after the process has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._launch import accelerator_memory
from rankwise._launch.accelerator_memory import AcceleratorMemory, used_memory
from rankwise.launching import ScriptLaunch

PROGRAM = Path(__file__).parent / "programs" / "fail_by_attempt.py"
GIB = 1 << 30


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the accelerators have in use at each reading; beside `test_the_memory_of_a_killed_process_is_waited_for`."""
    values: list[int] = []
    reader: Iterator[dict[int, int]] = ({0: values.pop(0) if len(values) > 1 else values[0]} for _ in iter(int, 1))
    monkeypatch.setattr(accelerator_memory, "used_memory", lambda: next(reader))
    return values


def test_it_waits_while_memory_is_released(readings: list[int]) -> None:
    readings += [9 * GIB, 5 * GIB, 2 * GIB, GIB]
    pauses: list[float] = []
    assert AcceleratorMemory({0: GIB}).wait_until_free(pauses.append) == ""
    assert len(pauses) == 3


def test_memory_that_is_not_released_is_named(readings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_memory, "_UNCHANGED_SECONDS", 0.01)
    readings += [3 * GIB]
    left = AcceleratorMemory({0: GIB}).wait_until_free(lambda _: None)
    assert left == "2048 MiB of accelerator 0 are still in use, which were free before the ranks started"


def test_without_accelerators_nothing_is_waited_for() -> None:
    assert AcceleratorMemory({}).wait_until_free(lambda _: pytest.fail("it waits")) == ""


@pytest.mark.slow
def test_a_restart_goes_on_when_the_memory_stays_in_use(
    readings: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator_memory, "_UNCHANGED_SECONDS", 0.3)
    readings += [3 * GIB]
    monkeypatch.setattr("rankwise._launch.agent.AcceleratorMemory", lambda *_: AcceleratorMemory({0: GIB}))
    with pytest.raises(rw.RankFailedError):
        ScriptLaunch(str(PROGRAM), ["1:a 2:b"], nproc=1, max_restarts=1).run()
    assert "2048 MiB of accelerator 0 are still in use" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not used_memory(), reason="no accelerator of NVIDIA")
def test_the_memory_of_a_killed_process_is_waited_for() -> None:
    memory = AcceleratorMemory()
    code = "import time, torch; torch.ones(1 << 28, device='cuda'); print(1, flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert sum(used_memory().values()) > sum(memory.before.values()) + GIB
        process.kill()
    assert memory.wait_until_free(time.sleep) == ""
