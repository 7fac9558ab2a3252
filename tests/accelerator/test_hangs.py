"""Ranks that wait for their devices, in a reduction of torch that one rank does not come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = Path(__file__).with_name("programs") / "hangs.py"


@pytest.mark.parametrize("way", ["report", "stacks"])
def test_the_rank_that_does_not_come_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", "1")
    monkeypatch.setenv("SIMDEV_COUNT", "3")
    command = [sys.executable, "-m", "rankwise", "launch", "-n", "3"]
    if way == "report":
        monkeypatch.setenv("RANKWISE_HANG_SECONDS", "2")
    with subprocess.Popen(
        [*command, str(PROGRAM)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            while way != "stacks" or sum("3000.0" in line for line in lines) < 6:
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
                if "missing:" in lines[-1]:
                    break
            if way == "stacks":
                looked = subprocess.run(
                    [sys.executable, "-m", "rankwise", "stacks", "--watch", "2", str(process.pid)],
                    capture_output=True, text=True, timeout=100, check=True,
                )  # fmt: skip
                lines.append(looked.stdout)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
    report = "".join(lines)
    if way == "stacks":
        assert "rank 1: apart from the others" in report, report
    else:
        assert "ranks 0, 2: waiting for " in report, report
        assert "in item at hangs.py:18" in report, report
        assert "missing: rank 1, not moving: sleep at hangs.py:15" in report, report
