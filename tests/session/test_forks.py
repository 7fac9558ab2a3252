"""Forked children: they are no ranks, and let go of nothing that has threads in their parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rankwise as rw
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port, plain, run_ranks

CHILDREN = [("arguments", "spawn"), ("adopted", "spawn"), ("adopted", "forkserver"), ("arguments", "forkserver")]
CHILDREN_PROGRAM = str(Path(__file__).parent / "programs" / "child_processes.py")


def said_in_a_forked_child(call: Callable[[], object]) -> str:
    """Return what a child says of why it cannot call something."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except rw.NotJoinedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_no_rank() -> None:
    with rw.init():
        group = rw.new_group([0])
        assert "forked from rank 0" in said_in_a_forked_child(lambda: rw.all_reduce(1))
        assert "forked from rank 0" in said_in_a_forked_child(lambda: rw.barrier(group=group))


@pytest.mark.parametrize("seen", [True, False], ids=["used before", "unused"])
@pytest.mark.usefixtures("foreign_group")
def test_a_forked_child_does_not_adopt_its_parents_group(seen: bool) -> None:
    """It would take its parent's place among the ranks."""
    if seen:
        rw.barrier()
    assert "forked from rank 0" in said_in_a_forked_child(rw.barrier)
    rw.barrier()


@pytest.mark.slow
def test_children_of_ranks_end_whatever_was_open(tmp_path: Path) -> None:
    """A group that a child releases waits for threads that only its parent has."""
    port, folder = free_port(3), {"TMPDIR": str(tmp_path)}  # loaders leave a folder
    for process in run_ranks("fork_children.py", [plain(rank, 2, port, **folder) for rank in range(2)], fresh=True):
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize(("how", "method"), variants(CHILDREN, slow=[CHILDREN[0], CHILDREN[2]]))
def test_children_of_any_start_method_know_their_rank(how: str, method: str) -> None:
    """Where no variable tells it; but a program that a rank starts, and a child after the session, are alone."""
    port = str(free_port())
    commands = [[sys.executable, CHILDREN_PROGRAM, str(rank), port, how, method] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE) for command in commands]
    for rank, process in enumerate(ranks):
        found, program, after = json.loads(process.communicate(timeout=200)[0])
        assert found == [[rank, 2], [3, 4], [rank, 2]]
        assert program == ["0", "1"]
        assert after == [0, 1]
