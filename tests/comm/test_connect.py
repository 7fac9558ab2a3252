"""Connecting the members of a group: timeouts, foreign clients, and stores with unexpected contents."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import rankwise as rw
from rankwise._comm.control.links import connect, connector, sockets
from rankwise._comm.control.registry import GroupRegistry
from rankwise._net import acceptor
from tests.comm import members
from tests.comm.members import assert_connected, in_threads, open_group


def test_clients_without_the_secret_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts any process can connect to a member."""
    monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    store, foreign = HashStore(), []
    listen = acceptor.listen

    def listen_and_connect(port: int, *, one_host: bool) -> socket.socket:
        listener = listen(port, one_host=one_host)
        for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(28), bytes(60)):
            client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            client.sendall(greeting)
            client.shutdown(socket.SHUT_WR)
            foreign.append(client)
        return listener

    monkeypatch.setattr(connector, "listen", listen_and_connect)
    links = in_threads(lambda group_rank: members.connect(group_rank, store))
    group = open_group(links)
    assert_connected(group)
    for member in group:
        member.leave("done")
    for client in foreign:
        client.close()


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_slow_and_silent_clients_delay_no_member(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a few seconds altogether, and no member waits for one of them alone."""
    monkeypatch.setattr(acceptor, "IDENTIFY_SECONDS", 1.0)
    if hosts == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    one_host, ended = hosts == "one host", threading.Event()
    listen = sockets.listen_locally if one_host else functools.partial(acceptor.listen, one_host=False)
    foreign: list[socket.socket] = []

    def listen_and_connect(*args: Any, **_more: Any) -> socket.socket:
        listener: socket.socket = listen(*args)
        for _ in range(30):
            foreign.append(socket.socket(listener.family))
            foreign[-1].connect(listener.getsockname())
        return listener

    def send_slowly() -> None:
        while not ended.wait(0.05):
            for client in foreign[::2]:
                with contextlib.suppress(OSError):
                    client.send(b"x")

    monkeypatch.setattr(connector, "listen_locally" if one_host else "listen", listen_and_connect)
    thread = threading.Thread(target=send_slowly)
    thread.start()
    stores = HashStore(), HashStore()
    for other in (1, 2):  # they are there, and do not connect
        stores[0].set(f"host/{other}", f"elsewhere{other}")
    (error,) = in_threads(lambda _: members.connect(0, stores[0], timeout=4.0, one_host=one_host), size=1)
    links = in_threads(lambda group_rank: members.connect(group_rank, stores[1]))
    ended.set()
    thread.join()
    assert "ranks 11-12 did not connect to rank 10 in 4 s. 30 connections were closed that were no rank's" in str(error)
    group = open_group(links)
    assert_connected(group)
    for member in group:
        member.leave("done")
    for client in foreign:
        client.close()


ODD = [
    b"",
    b"[",
    b"[" * 60_000,
    b"{}",
    b'{"local": "x", "remote": "", "port": 1e999, "secret": ""}',
    b"\xff",
]
ODD_NAMES = ["\0x", "../x", "rankwise-0\0", "x\x1b[2J", ""]


@pytest.mark.parametrize("odd", [*ODD, *ODD_NAMES], ids=range(len(ODD) + len(ODD_NAMES)))
def test_an_unreadable_address_is_an_error_that_names_the_rank(odd: bytes | str) -> None:
    address = {"local": odd, "remote": "", "port": 1, "secret": "00" * 16}
    entry = odd if isinstance(odd, bytes) else json.dumps(address).encode()
    store = HashStore()
    store.set("page/10", entry.decode(errors="surrogateescape") if odd != b"\xff" else "{")
    with pytest.raises(
        rw.CollectiveError, match="rank 10 cannot be reached: its address in the store cannot be read"
    ) as raised:
        members.connect(1, store, size=2, one_host=True)
    assert str(raised.value).isprintable()


def test_a_failing_store_is_an_error_of_ours() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    del store
    registry = GroupRegistry(
        rank=1,  # which reads the address of rank 0
        ranks=range(2),
        device=torch.device("cpu"),
        timeout=100.0,
        check=False,
        one_host=True,
        store=lambda: client,
        own_address=lambda: "127.0.0.1",
    )
    with pytest.raises(rw.CollectiveError, match="the store of the ranks failed"):
        registry.open_channel(0, range(2))


def test_missing_members_are_named() -> None:
    store = HashStore()
    (error,) = in_threads(lambda group_rank: members.connect(group_rank, store, timeout=0.3), size=1)
    assert isinstance(error, rw.CollectiveTimeoutError)
    assert "ranks 11-12 did not connect to rank 10 in 0.3 s" in str(error)

    def check_alive(awaited: Callable[[], Sequence[int]]) -> None:
        assert list(awaited()) == [11, 12]
        raise rw.CollectiveError("rank 12 is gone")

    (error,) = in_threads(lambda group_rank: members.connect(group_rank, HashStore(), check_alive=check_alive), size=1)
    assert str(error) == "rank 12 is gone"


def test_no_descriptor_stays_open_after_a_timeout() -> None:
    gc.collect()  # of earlier tests: now, not while descriptors are counted
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only the count is needed
    (error,) = in_threads(lambda group_rank: members.connect(group_rank, HashStore(), timeout=0.2), size=1)
    assert isinstance(error, rw.CollectiveTimeoutError)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_members_connect_with_many_open_files() -> None:
    """select() cannot wait for descriptors above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    store = HashStore()
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            files.enter_context(Path(os.devnull).open())
        links = in_threads(lambda group_rank: members.connect(group_rank, store))
        group = open_group(links)
        assert_connected(group)
        for member in group:
            member.leave("done")
