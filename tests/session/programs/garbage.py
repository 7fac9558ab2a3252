"""Throw garbage at whatever a process and its descendants listen on, until killed: SEED PID.

To look for what breaks them, by hand: start ranks in one shell, and this in another, with the shell's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys
import time

import psutil

MOST_HELD = 40


def pieces(draw: random.Random) -> list[bytes]:
    """Return what a visitor sends, piece by piece."""
    request: dict[str, object] = {
        "rank": 1,
        "world_size": 2,
        "local_rank": None,
        "host": "x",
        "process": 1,
        "check": False,
    }
    for name in draw.sample(sorted(request), draw.randrange(4)):
        request[name] = draw.choice([None, -1, 1 << 80, 1e308, "\x1b[2J", [[]], {}, True, "x" * 9000])
    ask = json.dumps({"protocol": "rankwise/1", "nonce": draw.choice(["0", "\ud800", 7, None, "x" * 60_000])}).encode()
    said = draw.choice(
        [
            b"",
            draw.randbytes(draw.choice([1, 20, 300, 100_000])),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
            draw.choice([b"[", b'{"a":', b'"\\u']) * draw.choice([10, 20_000]) + b"\n",
            ask + b"\n",
            (ask + b"\n") * 20,
            ask + b"\n" + json.dumps(request).encode() + b"\n",
            json.dumps(request).encode() + b"\n",
            bytes(20),
            struct.pack("<QQBB16sH", 1 << 60, 1, 1, 1, bytes(16), 65535),
            b"\n" * 1000,
        ]
    )
    if draw.random() < 0.3:
        return [said[at : at + 1] for at in range(min(len(said), 30))]
    return [said]


def doors(process: psutil.Process) -> list[tuple[int, object]]:
    """Return what the process and its descendants listen on that is a port, or a socket of rankwise's."""
    found: list[tuple[int, object]] = []
    pids = {one.pid for one in (process, *process.children(recursive=True))} - {os.getpid()}
    for each in psutil.net_connections("all"):
        if each.pid not in pids or not each.laddr:
            continue
        if each.status == psutil.CONN_LISTEN:
            found.append((each.family, (each.laddr.ip, each.laddr.port)))
        elif str(each.laddr).startswith("@rankwise-"):
            found.append((socket.AF_UNIX, f"\0{each.laddr[1:]}"))
    return found


def main(seed: str, pid: str) -> None:
    draw = random.Random(seed)  # noqa: S311 - for garbage
    process = psutil.Process(int(pid))
    held: list[tuple[socket.socket, list[bytes]]] = []
    thrown = 0
    while True:
        for family, address in doors(process):
            with contextlib.suppress(OSError):
                visitor = socket.socket(family)
                visitor.settimeout(0.2)
                visitor.connect(address)  # type: ignore[arg-type]  # of that family
                visitor.setblocking(False)
                held.append((visitor, pieces(draw)))
                thrown += 1
        for visitor, rest in held:
            with contextlib.suppress(OSError):
                if rest:
                    visitor.send(rest.pop(0))
        while len(held) > MOST_HELD or (held and draw.random() < 0.2):
            held.pop(draw.randrange(len(held)))[0].close()
        print(thrown, flush=True)
        time.sleep(0.01)


main(*sys.argv[1:])
