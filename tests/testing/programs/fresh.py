"""Tests that ask whether they run in the same processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.mark.ranks(2)
@pytest.mark.parametrize("time", ["first", "second"])
def test_process(time: str) -> None:
    with Path(f"processes{os.environ['RANK']}").open("a") as file:
        file.write(f"{os.getpid()}\n")
