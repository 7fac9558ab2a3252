"""Listen on the port of a name server, and never answer: silent_port.py."""

from __future__ import annotations

import signal
import socket

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.1", 53))
    signal.pause()
