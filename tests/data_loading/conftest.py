"""What loaders with workers change in their process, undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loaders_ended() -> Iterator[None]:
    """Wait for the threads of loaders, and give the handler back that torch sets to name workers that die."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(200)
