"""Memory that ranks of a host share: the setting, limits of a process, and ranks that are killed in a reduction."""

from __future__ import annotations

import random

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks


def run(*arguments: str, settings: tuple[str, ...] = ("", "", "")) -> list[list[str]]:
    """Return the lines that each rank prints."""
    port, size = free_port(), len(settings)
    environs = [plain(rank, size, port, RANKWISE_SHARED_MEMORY=value) for rank, value in enumerate(settings)]
    ended = run_ranks("shared_memory_setting.py", environs, *arguments)
    assert [process.returncode for process in ended] == [0] * size, [process.stderr for process in ended]
    return [process.stdout.splitlines() for process in ended]


@pytest.mark.parametrize(("setting", "shares"), variants([("1", True), ("0", False)], fast={("0", False)}))
def test_one_rank_decides_for_all(setting: str, shares: bool) -> None:
    assert run(settings=("", setting)) == [["4000000.0", "4000000.0", str(shares)]] * 2


def test_a_rank_without_address_space_is_an_error_on_all_and_the_next_call_works() -> None:
    first, second, third = run("memory")
    assert first[0].startswith("RemoteRankError "), first
    assert second[0].startswith("CollectiveError there is no memory for "), second
    assert first[1:] == second[1:] == third[1:] == ["6000000.0", "True"]


def test_no_descriptor_is_needed() -> None:
    assert run("descriptors") == [["6000000.0", "6000000.0", "True"]] * 3


@pytest.mark.slow
@pytest.mark.soak(40)
@pytest.mark.parametrize("part", range(5))
def test_a_rank_that_is_killed_in_a_reduction_is_named(part: int, seed: int) -> None:
    """The timeout of the session is 280 s: no rank has waited for it."""
    draw = random.Random(5 * seed + part)  # noqa: S311 - to be repeated
    size = draw.choice([2, 3, 4])
    victim, port = draw.randrange(size), free_port()
    arguments = [str(victim), f"{draw.uniform(0.0, 0.5):.4f}", str(5 * seed + part)]
    ended = run_ranks("kill_in_reduction.py", [plain(rank, size, port) for rank in range(size)], *arguments)
    assert ended.pop(victim).returncode == -9
    for process in ended:
        assert process.returncode == 1, process.stderr
        assert process.stdout.startswith("CollectiveError "), process.stdout
        assert f"rank {victim} is gone" in process.stdout, process.stdout
