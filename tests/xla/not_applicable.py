"""The tests with ranks that cannot run where the ranks are threads of one process, each with the reason.

A name is that of a file of `tests/contract`, or of a test in it, with or without its parameters.
"""

from __future__ import annotations

from typing import Final

import pytest

NOT_APPLICABLE: Final[dict[str, str]] = {}


def reason_not_to_run(item: pytest.Item) -> str | None:
    """Return why a test cannot run in threads, or None."""
    file, test = item.path.name, item.name
    names = (file, f"{file}::{test.partition('[')[0]}", f"{file}::{test}")
    return next((NOT_APPLICABLE[name] for name in names if name in NOT_APPLICABLE), None)
