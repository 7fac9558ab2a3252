"""A rank that waits for a value of another rank which never sends it."""

from __future__ import annotations

import signal

import pytest

from tests.session.worlds import free_port, plain, run_ranks


@pytest.mark.parametrize(
    ("how", "error", "status"),
    [
        ("killed", "CollectiveError", -signal.SIGKILL),
        pytest.param("late", "CollectiveTimeoutError", 0, marks=pytest.mark.slow),
        pytest.param("raises", "CollectiveError", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_never_sends(how: str, error: str, status: int) -> None:
    port = free_port()
    one, two = run_ranks("never_sends.py", [plain(rank, 2, port) for rank in range(2)], how)
    assert one.stdout.startswith(error), one
    assert "rank 1" in one.stdout
    assert two.returncode == status, two
