"""The end of a session on rank zero: it serves the store until no other rank needs it."""

from __future__ import annotations

import logging
import selectors
import socket
import time

from rankwise._text import ranks_text

log = logging.getLogger(__name__)

# How long rank zero waits for the others at the end before it says so.
_PATIENCE_SECONDS = 5.0


def outlive(lines: dict[int, socket.socket], *, timeout: float) -> None:
    """Serve the store until every other rank has hung up: one that has not may need it still."""
    start = time.monotonic()
    told = False
    with selectors.DefaultSelector() as selector:
        for rank, line in lines.items():
            selector.register(line, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() - start < timeout:
            for key, _ in selector.select(_PATIENCE_SECONDS / 10):
                selector.unregister(key.fileobj)
            if not told and selector.get_map() and time.monotonic() - start > _PATIENCE_SECONDS:
                told = True
                absent = sorted(key.data for key in selector.get_map().values())
                log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(absent))
