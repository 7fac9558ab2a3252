"""The lanes of tests, and the seeds of randomised ones. CONTRIBUTING.md has the rules."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from rankwise.testing._plugin.marker import SERIAL, read_marker, world_size_of

SEED = 0


def variants(values: Iterable[Any], *, fast: Container[Any] = (), slow: Container[Any] | None = None) -> list[Any]:
    """Return the values of a parameter, each in its lane; tuples are values of several.

    Args:
        values: All values.
        fast: Those that are not marked.
        slow: Those marked as slow, by default all others. What is in neither is marked as rare.
    """

    def in_its_lane(value: Any) -> Any:
        if value in fast:
            return value
        mark = pytest.mark.slow if slow is None or value in slow else pytest.mark.rare
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)

    found = list(values)
    unknown = [one for lane in (fast, slow or ()) if isinstance(lane, Iterable) for one in lane if one not in found]
    if unknown:
        raise ValueError(f"{unknown} are none of {found}")
    return [in_its_lane(value) for value in found]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that repeats the randomised tests."""
    parser.addoption(
        "--soak-seed",
        type=int,
        metavar="SEED",
        help="run each test marked `soak` as often as its mark requests, with this seed and those that follow it",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the seed."""
    seed = config.getoption("soak_seed")
    return [] if seed is None else [f"soak: seed {seed}; to repeat this run: make soak SEED={seed}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a randomised test its seeds: a fixed one, or many in a soak run."""
    if (mark := metafunc.definition.get_closest_marker("soak")) is not None:
        first = metafunc.config.getoption("soak_seed")
        seeds = [SEED] if first is None else range(first, first + mark.args[0])
        metafunc.parametrize("seed", seeds, ids=[f"seed{seed}" for seed in seeds])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests as slow: rare ones, and those in large worlds, or in those of sizes that the module or test names."""
    if item.get_closest_marker("rare") is not None:
        item.add_marker("slow")
    ranks, mark = read_marker(item), item.get_closest_marker("slow_with_ranks")
    if ranks is None or (mark is None and 2 not in ranks.sizes):
        return
    size = world_size_of(item)
    if (size in mark.args) if mark is not None else (size != SERIAL and int(size) > 2):
        item.add_marker("slow")
