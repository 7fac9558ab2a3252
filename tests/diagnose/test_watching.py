"""The verdict on several samples of a job: the place that is named of a rank that others wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rankwise._diagnose.sampling import ProcessSample, RankSample
from rankwise._diagnose.stack import Stack, StackFrame
from rankwise._diagnose.watching import suspects

REDUCES, READS, DECODES = "all_reduce at train.py:9", "next at train.py:7", "decode at train.py:8"


def sample(rank: int, location: str, state: str = "S") -> RankSample:
    frames = [StackFrame("all_reduce", "/torch/distributed/distributed_c10d.py", 1)] if location == REDUCES else []
    stack = Stack(frames, known_location=location)
    return RankSample(rank=rank, process=ProcessSample(pid=100 + rank, state=state, stack=stack))


@pytest.mark.parametrize(
    ("locations", "named"),
    [
        ([READS, READS, READS, READS], READS),
        ([READS, READS, READS, REDUCES], READS),  # slow, and in the collective as the last sample is taken
        ([DECODES, READS, READS, DECODES], DECODES),
        ([READS, READS, DECODES, REDUCES], READS),
    ],
)
def test_a_slow_rank_is_named_with_the_place_where_the_others_wait_for_it(locations: list[str], named: str) -> None:
    history = [[sample(0, REDUCES), sample(1, location), sample(2, REDUCES)] for location in locations]
    (suspect,) = suspects(history, 4.0)
    assert (suspect.rank, suspect.location) == (1, named)
    assert suspect.apart == len(locations) - locations.count(REDUCES)


def test_a_rank_that_has_stopped_is_named_with_the_place_where_it_has() -> None:
    ranks = [sample(1, READS), sample(1, READS), sample(1, DECODES, "T")]
    (suspect,) = suspects([[sample(0, REDUCES), rank] for rank in ranks], 3.0)
    assert suspect.location == f"{DECODES}, stopped by a signal (SIGCONT continues it)"


@pytest.mark.parametrize(("lines", "how"), [((7, 8), "moving (slow, not stuck)"), ((7, 7), "not moving")])
def test_a_rank_whose_stack_changes_is_slow_and_not_stuck(lines: Sequence[int], how: str) -> None:
    stacks = [Stack([StackFrame("read", "/home/me/data.py", line)], known_location=READS) for line in lines]
    late = [RankSample(rank=1, process=ProcessSample(pid=101, state="S", stack=stack)) for stack in stacks]
    (suspect,) = suspects([[sample(0, REDUCES), one] for one in late], 4.0)
    assert (suspect.rank, suspect.how) == (1, how)
