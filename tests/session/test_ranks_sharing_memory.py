"""Memory that ranks of a host share: the setting, limits of a process, and ranks that are killed while they use it."""

from __future__ import annotations

import random
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.lanes import variants
from tests.memory_group import memory_group
from tests.session.worlds import free_port, plain, run_ranks

# Enough for a value of 240 MB and what a process has besides, and not for another one.
LIMIT = 400 << 20


def run(*arguments: str, settings: tuple[str, ...] = ("", "", "")) -> list[list[str]]:
    """Return the lines that each rank prints."""
    port, size = free_port(), len(settings)
    environs = [plain(rank, size, port, RANKWISE_SHARED_MEMORY=value) for rank, value in enumerate(settings)]
    ended = run_ranks("shared_memory_setting.py", environs, *arguments)
    assert [process.returncode for process in ended] == [0] * size, [process.stderr for process in ended]
    return [process.stdout.splitlines() for process in ended]


def run_until_killed(program: str, number: int, **variables: str) -> tuple[int, list[CompletedProcess[str]]]:
    """Run ranks, one of which is killed at a random moment; return its rank, and how the others ended."""
    draw = random.Random(number)  # noqa: S311 - to be repeated
    size = draw.choice([2, 3, 4])
    victim, port = draw.randrange(size), free_port()
    arguments = [str(victim), f"{draw.uniform(0.0, 0.5):.4f}", str(number)]
    ended = run_ranks(program, [plain(rank, size, port, **variables) for rank in range(size)], *arguments)
    assert ended.pop(victim).returncode == -9
    assert [process.returncode for process in ended] == [1] * (size - 1), [process.stderr for process in ended]
    return victim, ended


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


@pytest.mark.soak(40)
@pytest.mark.parametrize("part", variants(range(5), slow=[0]))
def test_a_rank_that_is_killed_while_tensors_move_is_named(part: int, seed: int) -> None:
    """The timeout of the session is 280 s: no rank has waited for it."""
    victim, ended = run_until_killed("kill_in_reduction.py", 5 * seed + part)
    for process in ended:
        assert process.stdout.startswith("CollectiveError "), process.stdout
        assert f"rank {victim} is gone" in process.stdout, process.stdout


@pytest.mark.slow
def test_values_stay_when_their_sender_has_been_killed_and_after_finalize() -> None:
    """Children that are forked then read them too."""
    port = free_port()
    first, killed, third = run_ranks("keep_values.py", [plain(rank, 3, port) for rank in range(3)])
    assert killed.returncode == -9
    for process in (first, third):
        error, values = process.stdout.splitlines()
        assert "rank 1 is gone" in error
        assert values == "0.0 2.0 2.0 2000000", process.stderr


@pytest.mark.parametrize("limited", variants(["0", "1", "01"], slow=["01"]))
def test_a_value_that_does_not_fit_into_a_control_group_is_an_error_on_all(limited: str) -> None:
    """Of one rank that sends, or of two that together send too much; a rank that only maps needs no memory."""
    port = free_port()
    with memory_group(LIMIT * len(limited)) as group:
        environs = [plain(rank, 2, port, GROUP=str(group) if str(rank) in limited else "") for rank in range(2)]
        ended = run_ranks("little_memory.py", environs)
    assert [process.returncode for process in ended] == [0, 0], [process.stderr for process in ended]
    for process in ended:
        gathered, again, broadcast, end = process.stdout.splitlines()
        assert "do not fit into the" in gathered
        assert "do not fit into the" in again
        assert limited == "01" or ("do not fit into the" in broadcast) == (limited == "0")
        assert end == "2"
    for rank, process in enumerate(ended):
        if str(rank) not in limited:
            assert process.stdout.startswith(f"RemoteRankError rank {limited} on "), process.stdout


@pytest.mark.soak(40)
@pytest.mark.parametrize("part", variants(range(5), slow=[0]))
def test_a_rank_that_is_killed_while_others_map_its_values_is_named(part: int, seed: int, tmp_path: Path) -> None:
    """The timeout of the session is 280 s: no rank has waited for it. The others have nothing mapped in the end."""
    victim, ended = run_until_killed("kill_in_values.py", 5 * seed + part, TMPDIR=str(tmp_path))
    for process in ended:
        assert process.stdout.startswith("0 CollectiveError "), process.stdout
        assert f"rank {victim} is gone" in process.stdout, process.stdout
    assert not list(tmp_path.iterdir())
