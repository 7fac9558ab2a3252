"""A rank dies, or just ends: every other rank raises at once, and the message names the rank.

The session's timeout is 280 s, and the ranks are given 200: so nobody has waited for a timeout.
"""

from __future__ import annotations

import itertools
import re

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

CAUSES = {
    "killed": "is gone: its connection closed, so it was killed or exited without cleanup",
    "exits": "is gone: its connection closed, so it was killed or exited without cleanup",
    "raises": "left with ValueError: no data (vanish.py:",
    "ends": "left",
}
PLACES = ["at once", "later", "in a group", "in its turn", "in rank zero's turn", "while others wait"]
# Each cause, and the places that differ most.
FAST = {("at once", how, 2) for how in CAUSES} | {("in a group", "killed", 4)}
SLOW = {*((where, "killed", 4) for where in PLACES), ("in its turn", "raises", 2), ("in rank zero's turn", "ends", 2)}


@pytest.mark.parametrize(
    ("where", "how", "size"), variants(itertools.product(PLACES, CAUSES, [2, 4]), fast=FAST, slow=SLOW)
)
def test_every_other_rank_raises(how: str, where: str, size: int) -> None:
    who = {"in a group": 1, "while others wait": 1, "in rank zero's turn": 0}.get(where, size - 1)
    port = free_port()
    ended = run_ranks("vanish.py", [plain(rank, size, port) for rank in range(size)], how, where, str(who), seconds=200)
    for rank, process in enumerate(ended):
        if rank == who:
            continue
        assert process.returncode == 0, process.stderr
        if "turn" in where and how in {"raises", "ends"}:
            assert process.stdout.startswith(f"RemoteRankError rank {who} on "), process.stdout
            continue
        assert process.stdout.startswith("CollectiveError "), process.stdout
        assert f"rank {who} {CAUSES[how]}" in process.stdout, process.stdout


@pytest.mark.parametrize("size", variants([2, 4], fast=[2], slow=[]))
@pytest.mark.parametrize("where", ["in data", "in ragged data", "in all_to_all"])
def test_a_rank_that_is_killed_while_data_moves(where: str, size: int) -> None:
    port = free_port()
    ended = run_ranks(
        "vanish.py", [plain(rank, size, port) for rank in range(size)], "killed", where, str(size - 1), seconds=200
    )
    for process in ended[:-1]:
        assert process.returncode == 0, process.stderr
        assert process.stdout.startswith("CollectiveError "), process.stdout
        assert f"rank {size - 1} is gone" in process.stdout, process.stdout


@pytest.mark.parametrize("links", ["page", "sockets"])
def test_the_calls_of_missing_ranks_are_known(links: str) -> None:
    """Rank 1 waits in a group of two, in a thread."""
    port = free_port()
    ended = run_ranks("rank_states.py", [plain(rank, 3, port) for rank in range(3)], links, seconds=200)
    assert ended[0].returncode == 0, ended[0].stderr
    timeout, result = ended[0].stdout.splitlines()
    assert re.fullmatch(
        r"barrier 'epoch' at rank_states.py:\d+: not all ranks came within 0\.2 s\. Missing: "
        r"rank 1, last seen in barrier at rank_states.py:\d+, now in all_reduce at \S+ in the group of ranks 0-1, "
        r"for \d+\.\d s; rank 2, last seen in barrier at rank_states.py:\d+",
        timeout,
    )
    assert result == "2"


@pytest.mark.parametrize(
    ("how", "who"),
    variants(
        itertools.product(["raises", "killed", "opening", "late"], [0, 2]),
        fast=[("raises", 0), ("killed", 2), ("opening", 2), ("late", 2)],
        slow=[("killed", 0)],
    ),
)
def test_a_rank_that_fails_between_the_meeting_and_the_end_of_joining_is_named(how: str, who: int) -> None:
    """The timeout is 300 s, and a process group that opens hears nothing until then."""
    port = free_port()
    ended = run_ranks("die_joining.py", [plain(rank, 3, port) for rank in range(3)], how, str(who), seconds=200)
    for rank, process in enumerate(ended):
        if rank == who:
            assert process.stdout == ("RuntimeError the driver has no memory\n" if how == "raises" else "")
            continue
        assert process.stdout.startswith("JoinError "), (process.stdout, process.stderr)
        assert f"rank {who}" in process.stdout
        if how == "raises":
            assert f"rank {who}: RuntimeError: the driver has no memory" in process.stdout


def test_a_rank_that_dies_while_torch_makes_a_group_is_named() -> None:
    port = free_port()
    killed, other = run_ranks("die_in_new_group.py", [plain(rank, 2, port) for rank in range(2)])
    assert killed.returncode == -9, killed.stderr
    assert other.stdout.startswith(f"new_group failed on rank 1 of 2: rank 0 {CAUSES['killed']}"), other
