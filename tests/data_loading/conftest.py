"""What loaders with workers change in their process, undone."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sigchld() -> Iterator[None]:
    """Give the handler back that torch sets with the first loader, to name workers that die."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
