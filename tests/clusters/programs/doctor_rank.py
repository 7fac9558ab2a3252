"""`rankwise doctor` on a host whose clock is wrong, or that nobody can connect to."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

from rankwise.cli.main import main


@contextlib.contextmanager
def closed() -> Iterator[int]:
    yield int(os.environ["CLOSED_PORT"])


offset = float(os.environ.get("CLOCK_OFFSET", "0"))
if offset or "CLOSED_PORT" in os.environ:
    from rankwise._doctor import probes

    probes.time = SimpleNamespace(time=lambda: time.time() + offset)  # type: ignore[assignment, attr-defined]  # it has it, for itself
    if "CLOSED_PORT" in os.environ:
        probes._listening = closed
sys.argv.insert(1, "doctor")
main()
