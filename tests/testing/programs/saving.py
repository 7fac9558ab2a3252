"""A test after which a rank is killed while it writes its coverage."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import NoReturn

import coverage
import pytest


def save_half(measuring: coverage.Coverage) -> NoReturn:
    Path(measuring.get_data().data_filename()).write_bytes(b"SQLite format 3\0")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.ranks(2)
def test_ranks() -> None:
    importlib.import_module("covered").of_ranks(0)
    if os.environ["RANK"] == "1":
        coverage.Coverage.save = save_half  # type: ignore[assignment, method-assign]
