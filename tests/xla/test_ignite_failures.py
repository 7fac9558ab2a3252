"""The list of Ignite's tests that cannot pass is that of docs/migrate.md."""

from __future__ import annotations

from pathlib import Path

from tests.xla.ignite_failures import table

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


def test_the_page_lists_them() -> None:
    rows = PAGE.read_text().partition("With torch_xla 2.9")[2].partition("### ")[0].splitlines()
    assert [row for row in rows if row.startswith("| `")] == table()
