"""A rank is killed at a random moment of a random collective: each of the others raises, and nothing is left."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.lanes import variants
from tests.session.worlds import PROGRAMS, clean_environ, free_port, plain, run_ranks

RANKWISE = str(Path(sys.executable).with_name("rankwise"))


def drawn(seed: int) -> tuple[int, list[str]]:
    """Return the size of a world, and the arguments of the program: who is killed and when, and the seed."""
    draw = random.Random(seed)  # noqa: S311 - to be repeated
    size = draw.choice([2, 3, 4])
    return size, [str(draw.randrange(size)), f"{draw.uniform(0.0, 0.5):.4f}", str(seed)]


@pytest.mark.soak(500)
@pytest.mark.parametrize("calls", variants(["blocking", "non-blocking"], fast={"blocking"}, slow=[]))
def test_every_other_rank_names_the_one_that_was_killed(calls: str, seed: int) -> None:
    """The timeout of the session is 280 s: no rank has waited for it."""
    size, arguments = drawn(seed)
    arguments += ["non-blocking"] * (calls == "non-blocking")
    port = free_port()
    ended = run_ranks("random_kill.py", [plain(rank, size, port) for rank in range(size)], *arguments, seconds=200)
    victim = int(arguments[0])
    assert ended.pop(victim).returncode == -9
    for process in ended:
        assert process.returncode == 1, process.stderr
        assert process.stdout.startswith("CollectiveError "), process.stdout
        assert f"rank {victim} is gone" in process.stdout, process.stdout


@pytest.mark.slow
@pytest.mark.soak(300)
def test_the_launcher_names_the_one_that_was_killed_and_leaves_nothing(seed: int, tmp_path: Path) -> None:
    size, arguments = drawn(seed)
    with subprocess.Popen(
        [RANKWISE, "launch", "-n", str(size), str(PROGRAMS / "random_kill.py"), *arguments],
        env=clean_environ(TMPDIR=str(tmp_path), RANDOM_KILL=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        _, said = launcher.communicate(timeout=200)
    assert launcher.returncode == 137, said
    assert re.search(rf"^rankwise: rank {arguments[0]} of {size} on \S+ was killed by SIGKILL", said, re.MULTILINE), (
        said
    )
    assert not list(tmp_path.iterdir())
    assert not [process for process in psutil.process_iter() if is_of(process, str(tmp_path))]


def is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("RANDOM_KILL") == folder and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
