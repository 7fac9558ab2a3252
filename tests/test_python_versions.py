"""Features of the standard library that the oldest supported Python does not have."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_modules_are_imported_where_stream_handlers_are_not_generic() -> None:
    """As on Python 3.10."""
    program = (
        "import logging; vars(logging.StreamHandler).get('__class_getitem__') is None or "
        "delattr(logging.StreamHandler, '__class_getitem__'); import rankwise.compat.ignite"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
