"""The end of a session on rank zero, which serves the store until no other rank needs it."""

from __future__ import annotations

import logging
import socket
import time

from rankwise._net.polling import wait_readable
from rankwise._text import ranks_text

log = logging.getLogger(__name__)

# How long rank zero waits for the other ranks before it logs a warning.
_PATIENCE_SECONDS = 5.0


def serve_until_others_leave(connections: dict[int, socket.socket], *, timeout: float) -> None:
    """Wait until every other rank has closed its connection: a rank that has not may still need the store."""
    start = time.monotonic()
    warned = False
    connected = dict(connections)
    while connected and time.monotonic() - start < timeout:
        for rank in wait_readable(connected, _PATIENCE_SECONDS / 10):
            del connected[rank]
        if not warned and connected and time.monotonic() - start > _PATIENCE_SECONDS:
            warned = True
            log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(sorted(connected)))
