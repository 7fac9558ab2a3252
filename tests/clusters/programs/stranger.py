"""A process that is no part of a job, and reaches its ports: it never knows the secret. It goes on until it is killed.

Usage: stranger.py write|connect TRACE, where TRACE is a file that its pickles create where they are read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from datetime import timedelta

import psutil
from torch.distributed import TCPStore


class Trace:
    """A value whose pickle creates a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def write(trace: str) -> None:
    """Overwrite what a job writes into its store."""
    while True:
        with contextlib.suppress(RuntimeError, ValueError):
            store = TCPStore("left", 29500, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
            while True:
                keys = [
                    f"rankwise/none/0/1/rankwise/{key}/{rank}" for key in ("host", "all", "first") for rank in range(4)
                ]
                for key in (*keys, *(f"rankwise/none/0/1/group/0//cpu//0/{rank}" for rank in range(4))):
                    if store.check([key]):
                        store.set(key, pickle.dumps(Trace(trace)).decode("latin1"))
                time.sleep(0.001)
        time.sleep(0.1)


def connect(trace: str) -> None:
    """Connect to all ports that processes of this host listen on, first and often, and send pickles or nothing."""
    kept: list[socket.socket] = []
    while True:
        listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        ports = {address.port for address in listening if address}
        for port in ports:
            for data in (b"", b"x", bytes(20), pickle.dumps(Trace(trace)), os.urandom(100)):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                    kept.append(connection)
                    connection.sendall(data)
        while len(kept) > 500:
            kept.pop(0).close()
        time.sleep(0.01)


{"write": write, "connect": connect}[sys.argv[1]](sys.argv[2])
