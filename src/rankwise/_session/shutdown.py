"""The end of a session: its groups, their threads, its connections, and on rank zero the wait for the other ranks."""

from __future__ import annotations

import logging
import socket
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from rankwise._comm.comm import Comm
from rankwise._comm.gloo_threads import await_idle_threads
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._net.polling import wait_readable
from rankwise._session.joining import Joined
from rankwise._text import ranks_text

log = logging.getLogger(__name__)

# How long rank zero waits for the other ranks before it logs a warning.
_PATIENCE_SECONDS = 5.0
# How long rank zero serves the store after an error: the others may still read the reason from it, as in an exclusive
# section that has failed.
_FAILED_SECONDS: Final = 5.0


@dataclass(slots=True)
class OpenedResources:
    """The resources that a session has opened, and closes."""

    comm: Comm
    group: weakref.ref[dist.ProcessGroup]
    joined: Joined
    hooks: tuple[Callable[..., object], Callable[..., object]]
    timeout: float
    reset: Callable[[], None]
    unset_interface: Callable[[], None]

    def close(self, reason: str, failed: bool) -> None:
        """Close all of them, and wait for the other ranks on rank zero, whose store they may still need."""
        self.reset()
        self.unset_interface()
        # First: ranks that have closed already may be joining the next world, perhaps on the same port.
        self.joined.release_port()
        still_ours = dist.is_initialized() and dist.group.WORLD is self.group()
        self.comm.shutdown(reason)
        if still_ours:
            dist.destroy_process_group()
        await_idle_threads()
        before, theirs = self.hooks
        if sys.excepthook is theirs:
            sys.excepthook = before
        if self.joined.reading.rank.value == 0:
            _serve_until_others_leave(self.joined.connections, timeout=_FAILED_SECONDS if failed else self.timeout)
        self.joined.close()


def _serve_until_others_leave(connections: dict[int, socket.socket], *, timeout: float) -> None:
    """Wait until every other rank has closed its connection: a rank that has not may still need the store."""
    start = time.monotonic()
    warned = False
    connected = dict(connections)
    while connected and elapsed_since(start) < timeout:
        for rank in wait_readable(connected, _PATIENCE_SECONDS / 10):
            del connected[rank]
        if not warned and connected and time.monotonic() - start > _PATIENCE_SECONDS:
            warned = True
            log.warning("rank 0 waits up to %g s until %s leave(s)", timeout, ranks_text(sorted(connected)))
