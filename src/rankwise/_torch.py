"""The only file that touches what torch keeps private, each with the version it was checked on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make process groups that are opened inside listen on the loopback interface only, unless the user chose another.

    Checked on 2.13: gloo reads GLOO_SOCKET_IFNAME with C's getenv whenever it opens a group, and
    `init_process_group(pg_options=)` ignores options for gloo. The variable is put where gloo looks and taken away
    again; `os.environ` never shows it.
    """
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((interface for _, interface in socket.if_nameindex() if interface in {"lo", "lo0"}), None)
    if name in os.environ or loopback is None:
        yield
        return
    os.putenv(name, loopback)
    try:
        yield
    finally:
        os.unsetenv(name)
