"""A test that takes longer than pytest-timeout allows, and one that is interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


@pytest.mark.timeout(3)
@pytest.mark.ranks(2)
def test_sleeps() -> None:
    time.sleep(100)


@pytest.mark.ranks(2)
def test_is_interrupted() -> None:
    Path(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(100)
