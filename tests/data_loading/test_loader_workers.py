"""Workers of loaders, of every start method: the rank that they belong to, their elements, and their random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port

PROGRAM = str(Path(__file__).parent / "programs" / "loaders.py")
METHODS = [("fork",), ("spawn",), ("forkserver",)]


@pytest.mark.parametrize("method", variants([method for (method,) in METHODS], fast=["fork"], slow=["spawn"]))
def test_workers_of_any_start_method_have_their_part_and_their_stream(method: str) -> None:
    port, size = str(free_port()), 2
    commands = [[sys.executable, PROGRAM, str(rank), str(size), port, method] for rank in range(size)]
    ranks = [subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE) for command in commands]
    found = [json.loads(process.communicate(timeout=200)[0])[method] for process in ranks]
    assert [sorted(numbers) for numbers, _, _ in found] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert sorted(found[0][2] + found[1][2]) == list(range(8))
    assert sorted(found[0][2] + found[1][2]) != found[0][2] + found[1][2]
    for kind in range(3):  # torch, numpy, random
        drawn = [one[kind] for _, draws, _ in found for one in draws]
        assert len(set(drawn)) == 8
    seeded = [[one[3] for one in draws] for _, draws, _ in found]
    assert len(set(seeded[0] + seeded[1])) == 4, "by rw.seed() in a worker, one for each rank and worker"
