"""Texts that tests compare with recorded ones, in tests/data. `python -m` and the name of a test records them anew."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "data"


def assert_recorded(name: str, lines: Iterable[str], module: str) -> None:
    """Compare lines with a recorded file; the error shows the lines that differ, and how to record them anew."""
    recorded = (FOLDER / name).read_text().splitlines()
    different = list(difflib.unified_diff(recorded, list(lines), f"tests/data/{name}", "now", lineterm="", n=1))
    assert not different, "\n".join([f"if this is on purpose: python -m {module}", *different])


def record(name: str, lines: Iterable[str]) -> None:
    """Record lines."""
    (FOLDER / name).write_text("".join(f"{line}\n" for line in lines))
