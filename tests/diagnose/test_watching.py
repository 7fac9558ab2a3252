"""The verdict on several samples of a job: the place that is named of a rank that others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


@pytest.mark.parametrize("state", ["S", "R"])
def test_ranks_that_wait_for_their_devices_wait_for_a_rank_elsewhere(state: str) -> None:
    def waiting(rank: int, location: str = "item at train.py:9") -> RankSample:
        process = ProcessSample(pid=100 + rank, state=state, stack=Stack([], location), waits_for_device=True)
        return RankSample(rank=rank, process=process)

    history = [[waiting(0), sample(1, READS), waiting(2)] for _ in range(4)]
    (suspect,) = suspects(history, 4.0)
    assert (suspect.rank, suspect.location) == (1, READS)
    # A rank that is in a later step than the others waits for its device too.
    later = waiting(1, "cpu at train.py:7")
    (suspect,) = suspects([[waiting(0), later, waiting(2)] for _ in range(4)], 4.0)
    assert (suspect.rank, suspect.location) == (1, "cpu at train.py:7")


LINES = {
    "loss = total.sum().item()": "item",
    "losses = [loss.item() for loss in losses]": "item",
    "print(scaled(loss).cpu().numpy())": "f",  # several of these
    "batch = next(batches)": "next",
    "total = scaled(loss) + shift(loss)": "f",
}


@pytest.mark.parametrize("line", LINES)
def test_the_function_of_a_line_that_waits_for_a_device(line: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"{line}\n")
    stack = Stack([StackFrame("f", str(program), 1)])
    assert stack.location == f"{LINES[line]} at train.py:1"
    assert stack.reads_device == (LINES[line] == "item")


def test_an_optimizer_waits_for_the_queue_of_its_device() -> None:
    frames = [StackFrame("adamw", "/site-packages/torch/optim/adamw.py", 7), StackFrame("f", "/home/me/train.py", 1)]
    assert Stack(frames).reads_device
    assert not Stack(frames[1:]).reads_device


@pytest.mark.parametrize(("lines", "how"), [((7, 8), "moving (slow, not stuck)"), ((7, 7), "not moving")])
def test_a_rank_whose_stack_changes_is_slow_and_not_stuck(lines: Sequence[int], how: str) -> None:
    stacks = [Stack([StackFrame("read", "/home/me/data.py", line)], known_location=READS) for line in lines]
    late = [RankSample(rank=1, process=ProcessSample(pid=101, state="S", stack=stack)) for stack in stacks]
    (suspect,) = suspects([[sample(0, REDUCES), one] for one in late], 4.0)
    assert (suspect.rank, suspect.how) == (1, how)
