"""The end of a session on rank zero: it serves the store until no other rank needs it."""

from __future__ import annotations

import logging
import socket
import time

from rankwise._net.polling import wait_readable
from rankwise._text import ranks_text

log = logging.getLogger(__name__)

# How long rank zero waits for the others at the end before it says so.
_PATIENCE_SECONDS = 5.0


def outlive(lines: dict[int, socket.socket], *, timeout: float) -> None:
    """Serve the store until every other rank has hung up: one that has not may need it still."""
    start = time.monotonic()
    told = False
    connected = dict(lines)
    while connected and time.monotonic() - start < timeout:
        for rank in wait_readable(connected, _PATIENCE_SECONDS / 10):
            del connected[rank]
        if not told and connected and time.monotonic() - start > _PATIENCE_SECONDS:
            told = True
            log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(sorted(connected)))
