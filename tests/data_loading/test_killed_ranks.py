"""A rank is killed in a loop. The timeout is 280 s, and the ranks are given 200: so nobody has waited for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

PROGRAM = str(Path(__file__).parent / "programs" / "killed_in_step.py")


@pytest.mark.parametrize("size", variants([2, 4], fast=[2]))
def test_a_rank_that_is_killed_between_steps_is_an_error_on_the_others(size: int) -> None:
    port = free_port()
    *others, killed = run_ranks(PROGRAM, [plain(rank, size, port) for rank in range(size)], seconds=200)
    assert killed.returncode == -9
    for process in others:
        assert process.returncode == 0, process.stderr
        assert process.stdout.startswith("CollectiveError [0, 1] "), process.stdout
        assert f"rank {size - 1} is gone" in process.stdout, process.stdout
