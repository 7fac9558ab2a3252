"""What docs/migrate.md shows: the line to change is the one that programs change here, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.compat.adapted import REPLACED

# The chapter on Ignite has tables of its own kind, and tests beside it.
PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text().partition("## ignite.distributed")[0]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_each_original_has_its_code_of_today() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs(number: int) -> None:
    names: dict[str, object] = {"__name__": "page"}
    with torch.random.fork_rng():
        exec(BLOCKS[number], names)  # noqa: S102 - which is the point
    wanted = [("losses", [0.75, 0.75]), ("score", 3.0), ("world_size", 1)]
    name, value = wanted[number]
    assert names[name] == value


def test_the_line_to_change_is_shown() -> None:
    for original, ours in REPLACED.items():
        assert f"\n-{original}" in PAGE
        assert f"\n+{ours}" in PAGE


def test_tables_are_whole() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert {row.count(" | ") for row in rows} <= {1, 2}
    shown = [row for row in rows if "<br>" in row]
    assert len(shown) > 40
    assert all(row.count("<br>") == 1 for row in shown), "two lines each"
