"""Sessions of many ranks or many groups, and sessions with few descriptors."""

from __future__ import annotations

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

pytestmark = pytest.mark.slow


def run(size: int, *arguments: str) -> list[str]:
    """Return the output of each rank; all but the last one, which may be killed, end well."""
    port = free_port()
    ended = run_ranks("scale.py", [plain(rank, size, port) for rank in range(size)], *arguments)
    assert [process.returncode for process in ended[:-1]] == [0] * (size - 1), [process.stderr for process in ended]
    assert ended[-1].returncode == (-9 if "many_ranks" in arguments else 0), ended[-1].stderr
    return [process.stdout for process in ended]


def test_sixty_ranks_on_one_host() -> None:
    run(60, "many_ranks")


def test_three_hundred_groups_leave_nothing() -> None:
    run(3, "many_groups")


def test_eight_ranks_with_few_descriptors() -> None:
    assert run(8, "few_files", "68") == ["works\n"] * 8


@pytest.mark.parametrize("limit", variants([16, 24], slow=[24]))
def test_too_few_descriptors_are_an_error_on_all_ranks(limit: int) -> None:
    """Rank zero names the limit; a rank that has not reached it before it ended does not know the cause."""
    first, *others = run(8, "few_files", str(limit))
    assert first.startswith("JoinError "), first
    assert "Too many open files" in first
    assert "ulimit -n" in first
    assert all(text.startswith("Join") for text in others), others
