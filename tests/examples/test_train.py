"""The training example: killed and started again, it ends with the bits of a run that was not interrupted."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
TRAIN = str(Path(__file__).parents[2] / "examples" / "train.py")


def started(folder: Path, *options: str, nproc: int = 2) -> subprocess.Popen[str]:
    command = [str(BIN / "rankwise"), "launch", "-n", str(nproc), "--no-prefix", TRAIN, str(folder), *options]
    environ = clean_environ(TORCHINDUCTOR_CACHE_DIR=str(folder.parent / "inductor"))
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *options: str, nproc: int = 2) -> str:
    with started(folder, *options, nproc=nproc) as process:
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return output


def trains(process: psutil.Process) -> bool:
    try:
        return TRAIN in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


def interrupt(folder: Path, how: str, lines: int, *options: str) -> str:
    """Run until so many lines are printed, end it, and return what it has printed: all, if it was faster."""
    with started(folder, *options) as process:
        assert process.stdout is not None
        shown = "".join(process.stdout.readline() for _ in range(lines))
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if trains(each)]
        if how == "SIGTERM":
            process.terminate()
        elif how == "all":
            process.kill()
        elif ranks:
            os.kill(random.choice(ranks).pid, signal.SIGKILL)  # noqa: S311
        shown += process.communicate(timeout=200)[0]
    psutil.wait_procs(ranks, timeout=200)
    return shown


INTERRUPTIONS = [["all"], ["SIGTERM", "one", "all"]]


@pytest.mark.parametrize("interruptions", variants(INTERRUPTIONS, slow=INTERRUPTIONS[:1]))
def test_interrupted_runs_end_with_the_same_bits(interruptions: list[str], tmp_path: Path) -> None:
    options = ("--epochs", "4", "--save-every", "3", "--workers", "1")
    expected = run(tmp_path / "whole", *options).splitlines()[-1]
    assert re.fullmatch(r"accuracy 0\.9\d+, parameters [0-9a-f]{16}", expected)
    for how in interruptions:
        interrupt(tmp_path / "parts", how, random.randint(2, 8), *options)  # noqa: S311
    begin, *_, end = run(tmp_path / "parts", *options).splitlines()
    assert int(re.findall(r"\d+", begin)[0]) >= 3, "it went on"
    assert end == expected


@pytest.mark.rare
def test_another_number_of_ranks_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    options = ("--epochs", "6", "--save-every", "20", "--dropout", "0")  # long enough not to end before the interrupt
    whole = run(tmp_path / "whole", *options, nproc=1)
    parts = interrupt(tmp_path / "parts", "all", 3, *options)
    parts += run(tmp_path / "parts", *options, nproc=3)
    losses = [re.findall(r"step (\d+): loss (\S+), saved", output) for output in (whole, parts)]
    (step, loss), (step_of_parts, loss_of_parts) = losses[0][-1], losses[1][-1]
    assert step == step_of_parts == "120"
    assert float(loss_of_parts) == pytest.approx(float(loss), abs=1e-5), "but for the order of sums in float32"
