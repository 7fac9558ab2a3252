"""A rank is stopped, or killed, at each point of an exchange over the page, while the others wait for it.

A stopped one continues after the call of all others has ended: then its call ends as theirs, and the next call works.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

SIZE = 3
# Rank 0 leads the exchanges.
POINTS = [
    *itertools.product(["before its frame", "after its frame", "before reading", "after reading"], [0, 1]),
    *itertools.product(["in data", "before a reduction in memory", "before its result"], [0, 1]),
    ("before the verdict", 0),
    ("after the verdict", 0),
]
# The other ranks need nothing of the rank any more.
COMPLETE = {
    ("after its frame", 1),
    ("before reading", 1),
    ("after reading", 1),
    ("after the verdict", 0),
}
# The calls that move data have no timeout of their own.
IN_DATA = {"in data", "before a reduction in memory", "before its result"}
FAST = {("before its frame", 1), ("after its frame", 0), ("before its result", 1)}
SLOW = {("in data", 1), ("before a reduction in memory", 0), ("before the verdict", 0), ("after reading", 1)}
WITHOUT_DATA = [each for each in POINTS if each[0] not in IN_DATA]


def run(point: str, who: int, way: str, folder: Path) -> list[list[str]]:
    """Return how the two calls of each rank ended."""
    port = free_port()
    environs = [plain(rank, SIZE, port) for rank in range(SIZE)]
    ended = run_ranks("break_exchange.py", environs, point, str(who), way, str(folder))
    for rank, process in enumerate(ended):
        assert process.returncode == (-9 if way == "kill" and rank == who else 0), process.stderr
    return [process.stdout.splitlines() for process in ended]


@pytest.mark.parametrize(("point", "who"), variants(POINTS, fast=FAST, slow=SLOW))
def test_a_rank_that_is_killed_is_named(point: str, who: int, tmp_path: Path) -> None:
    ended = run(point, who, "kill", tmp_path)
    del ended[who]
    gone = f"rank {who} is gone"
    for one, other in ended:
        if (point, who) in COMPLETE:
            assert one == "result None"
        else:
            assert one.startswith("CollectiveError "), one
            assert gone in one
        assert other.startswith("CollectiveError "), other
        assert gone in other


@pytest.mark.parametrize(
    ("point", "who"),
    variants(WITHOUT_DATA, fast=FAST.intersection(WITHOUT_DATA), slow=SLOW.intersection(WITHOUT_DATA)),
)
def test_a_rank_that_is_stopped_does_not_count_for_the_next_call(point: str, who: int, tmp_path: Path) -> None:
    ended = run(point, who, "stop", tmp_path)
    for rank, (one, other) in enumerate(ended):
        if (point, who) in COMPLETE or (point == "before the verdict" and rank == who):
            assert one == "result None"
        else:
            assert one.startswith("CollectiveTimeoutError "), one
            assert f"Missing: rank {who}" in one
        assert other == f"result {SIZE}"


@pytest.mark.parametrize("who", variants([0, 1], slow=[1]))
def test_a_rank_that_is_stopped_in_its_data_is_named(who: int, tmp_path: Path) -> None:
    """The others do not know which part of the data it has sent, so the group ends."""
    ended = run("in data", who, "stop", tmp_path)
    for rank, (one, other) in enumerate(ended):
        assert one.startswith("Collective"), one
        assert rank == who or f"rank {who}" in one, one
        assert "CollectiveError" in other, other


@pytest.mark.parametrize("way", variants(["continue", "kill"], fast={"kill"}))
def test_a_rank_that_stops_in_a_reduction_in_memory_is_waited_for(way: str) -> None:
    """It counts as gone only when it is killed while it is stopped."""
    port = free_port()
    ended = run_ranks("stopped_reduction.py", [plain(rank, SIZE, port) for rank in range(SIZE)], way)
    if way == "kill":
        assert ended.pop(1).returncode == -9
    for process in ended:
        lines = process.stdout.splitlines()
        if way == "continue":
            assert lines == [f"result [{float(SIZE**2)}]", f"result {SIZE}"], process.stderr
        else:
            assert len(lines) == 2, process.stderr
            assert all(line.startswith("CollectiveError ") and "rank 1 is gone" in line for line in lines), lines
