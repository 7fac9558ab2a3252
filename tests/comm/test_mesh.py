"""The connections themselves: members are threads of this process, on one host or as if on several."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import rankwise as rw
from rankwise._comm.control import connect, sockets
from rankwise._comm.control.connect import connect_mesh
from rankwise._comm.control.mesh import Mesh
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.registry import GroupRegistry
from rankwise._net import acceptor

SIZE = 3
CALL = Frame(FrameKind.CALL, 0, "all_reduce at train.py:88")


def in_threads(talk: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Run a function for each place at the same time, and return what each returned or raised."""
    results: list[Any] = [None] * size

    def one(place: int) -> None:
        try:
            results[place] = talk(place)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return results


def connected(group_rank: int, store: HashStore, size: int = SIZE, **more: Any) -> Mesh:
    """Return the mesh of one member of a group of ranks 10, 11, ...; `more` replaces arguments of `connect_mesh`."""
    settings: dict[str, Any] = {"one_host": False, "own_address": lambda: "127.0.0.1", "timeout": 100.0}
    settings |= {"check_alive": lambda _: None} | more
    return connect_mesh(store=store, name="group", ranks=range(10, 10 + size), group_rank=group_rank, **settings)


@pytest.fixture(params=["one host", "several hosts"])
def meshes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mesh]]:
    if request.param == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    store = HashStore()
    made: list[Mesh] = in_threads(lambda place: connected(place, store))
    assert all(mesh.same_host is (request.param == "one host") for mesh in made)
    yield made
    for mesh in made:
        mesh.abandon()


def swap(mesh: Mesh, bodies: list[bytes], timeout: float = 100.0) -> dict[int, Frame]:
    return mesh.exchange_frames(CALL, bodies, timeout=timeout, on_pause=lambda _: None)


def swap_one(meshes: list[Mesh], bodies: list[list[bytes]], place: int) -> dict[int, Frame]:
    return swap(meshes[place], bodies[place])


def test_frames_reach_the_member_that_they_are_for(meshes: list[Mesh]) -> None:
    """Also frames larger than what a connection takes at once, from all to all."""
    for length in (1, 3_000_000):
        bodies = [[bytes([place, to]) * length for to in range(SIZE)] for place in range(SIZE)]
        found = in_threads(functools.partial(swap_one, meshes, bodies))
        for place, frames in enumerate(found):
            for sender in range(SIZE):
                assert frames[sender].body == bytes([sender, place]) * length
                assert frames[sender].call == CALL.call


@pytest.mark.soak(50)
def test_data_follows_frames_and_frames_follow_data(meshes: list[Mesh], seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - a test
    sizes = [[generator.choice([1, 17, 40_000, 2_000_000]) for _ in range(SIZE)] for _ in range(SIZE)]

    def talk(place: int) -> list[bool]:
        received = []
        for turn in range(5):
            swap(meshes[place], [b""] * SIZE)
            room = {other: bytearray(sizes[other][place]) for other in range(SIZE) if other != place}
            meshes[place].transfer(
                {to: memoryview(bytes([place + turn]) * sizes[place][to]) for to in range(SIZE) if to != place},
                {other: memoryview(data) for other, data in room.items()},
                timeout=100.0,
            )
            received += [
                bytes(data[:1]) * len(data) == data and data[0] == other + turn for other, data in room.items()
            ]
        return received

    assert in_threads(talk) == [[True] * 10] * SIZE


def test_a_member_that_leaves_says_why(meshes: list[Mesh]) -> None:
    in_threads(lambda place: swap(meshes[place], [b""] * SIZE))
    meshes[1].close("left with ValueError: no data (train.py:12)")

    def talk(place: int) -> object:
        return swap(meshes[place], [b""] * SIZE) if place != 1 else None

    for error in (found for found in in_threads(talk) if found is not None):
        assert isinstance(error, rw.CollectiveError)
        place = "" if meshes[0].same_host else f" on {socket.gethostname()}"
        assert f"rank 11{place} left with ValueError: no data (train.py:12)" in str(error)
        assert "last seen in all_reduce at train.py:88" in str(error)


def test_a_member_that_leaves_in_the_middle_of_its_data_is_gone(meshes: list[Mesh]) -> None:
    data = bytes(20_000_000)

    def talk(place: int) -> None:
        swap(meshes[place], [b""] * SIZE)
        if place == 0:
            meshes[0].transfer({1: memoryview(data)}, {}, timeout=100.0)
        elif place == 1:
            room = bytearray(len(data))
            meshes[1]._peers[0].receive()
            meshes[0].close("broke off")
            meshes[1].transfer({}, {0: memoryview(room)}, timeout=100.0)

    found = in_threads(talk)
    assert isinstance(found[1], rw.CollectiveError), found
    assert "rank 10" in str(found[1])


def test_one_that_gives_up_tells_the_others(meshes: list[Mesh]) -> None:
    both = in_threads(lambda place: swap(meshes[place], [b""] * SIZE, timeout=0.2) if place else None)
    late = in_threads(lambda place: None if place else swap(meshes[place], [b""] * SIZE))[0]
    for error in (*both[1:], late):
        assert isinstance(error, rw.CollectiveTimeoutError)
        place = "" if meshes[0].same_host else f" on {socket.gethostname()}"
        assert f"Missing: rank 10{place}, not seen in any collective here" in str(error)
    assert in_threads(lambda place: len(swap(meshes[place], [b""] * SIZE))) == [SIZE] * SIZE


def test_a_failure_is_heard_without_waiting_for_the_rest(meshes: list[Mesh]) -> None:
    meshes[2].post_frame(Frame(FrameKind.FAILED, 0, CALL.call, body=b"why"), timeout=100.0)
    frames = in_threads(lambda place: swap(meshes[place], [b""] * SIZE) if place == 0 else None)[0]
    assert frames[2].body == b"why"
    assert 1 not in frames


FAILED = Frame(FrameKind.FAILED, 0, CALL.call, body=bytes(800))


def kept(meshes: list[Mesh]) -> int:
    """Return how many bytes and frames members keep of what they have to say and have heard."""
    peers = [peer for mesh in meshes for peer in mesh._peers.values()]
    return sum(len(peer.outbox) + len(peer.inbox) + 1000 * len(peer.frames) for peer in peers)


def test_members_that_fail_in_every_call_keep_nothing_of_it(meshes: list[Mesh]) -> None:
    for _ in range(3000):
        for mesh in meshes:
            mesh.post_frame(FAILED, timeout=100.0)
    assert kept(meshes) < 50_000
    assert in_threads(lambda place: len(swap(meshes[place], [b""] * SIZE))) == [SIZE] * SIZE


def test_one_that_fails_again_and_again_waits_for_those_that_read_nothing(meshes: list[Mesh]) -> None:
    with pytest.raises(rw.CollectiveTimeoutError, match=r"ranks? 1.* read nothing for 0\.2 s"):
        for _ in range(100_000):
            meshes[0].post_frame(FAILED, timeout=0.2)
    said = meshes[0].sequence
    assert kept(meshes) < 2_500_000

    def catch_up(place: int) -> int:
        for _ in range(said):
            if place:
                meshes[place].post_frame(FAILED, timeout=100.0)
        return len(swap(meshes[place], [b""] * SIZE))

    assert in_threads(catch_up) == [SIZE] * SIZE


def test_strangers_do_not_take_a_members_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts anybody can connect: whoever does not know the secret is sent away."""
    monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    store, strangers = HashStore(), []

    def reach() -> str:
        return "127.0.0.1"

    listen = acceptor.listen

    def listen_and_be_met(port: int, *, one_host: bool) -> socket.socket:
        listener = listen(port, one_host=one_host)
        for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(20)):
            stranger = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        return listener

    monkeypatch.setattr(connect, "listen", listen_and_be_met)
    made = in_threads(lambda place: connected(place, store, own_address=reach))
    assert in_threads(lambda place: len(swap(made[place], [b""] * SIZE))) == [SIZE] * SIZE
    for mesh in made:
        mesh.abandon()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("place", ["one host", "several hosts"])
def test_strangers_that_speak_slowly_or_not_hold_no_member_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a few seconds altogether, and nobody waits for one of them alone."""
    monkeypatch.setattr(acceptor, "IDENTIFY_SECONDS", 0.2)
    if place == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    near, ended = place == "one host", threading.Event()
    listen = sockets.listen_locally if near else functools.partial(acceptor.listen, one_host=False)
    strangers: list[socket.socket] = []

    def listen_and_be_met(*args: Any, **_more: Any) -> socket.socket:
        listener: socket.socket = listen(*args)
        for _ in range(30):
            strangers.append(socket.socket(listener.family))
            strangers[-1].connect(listener.getsockname())
        return listener

    def speak_slowly() -> None:
        while not ended.wait(0.05):
            for stranger in strangers[::2]:
                with contextlib.suppress(OSError):
                    stranger.send(b"x")

    monkeypatch.setattr(connect, "listen_locally" if near else "listen", listen_and_be_met)
    thread = threading.Thread(target=speak_slowly)
    thread.start()
    store = HashStore()
    for other in (1, 2):  # they are there, and do not connect
        store.set(f"group/host/{other}", "elsewhere")
    (error,) = in_threads(lambda place: connected(place, store, timeout=1.0, one_host=near), size=1)
    store = HashStore()
    made = in_threads(lambda place: connected(place, store))
    ended.set()
    thread.join()
    assert "ranks 11-12 did not connect to rank 10 in 1 s. 30 connections were closed that were no rank's" in str(error)
    assert in_threads(lambda place: len(swap(made[place], [b""] * SIZE))) == [SIZE] * SIZE
    for mesh in made:
        mesh.abandon()
    for stranger in strangers:
        stranger.close()


ODD = [
    b"",
    b"[",
    b"[" * 60_000,
    b"{}",
    b'{"host": "", "local": "x", "remote": "", "port": 1e999, "secret": ""}',
    b"\xff",
]
PATHS = ["\0x", "../x", "rankwise-0\0", "x\x1b[2J", ""]


@pytest.mark.parametrize("odd", [*ODD, *PATHS], ids=range(len(ODD) + len(PATHS)))
def test_an_address_that_cannot_be_read_is_an_error_of_ours(odd: bytes | str) -> None:
    address = {"host": "", "local": odd, "remote": "", "port": 1, "secret": "00" * 16}
    said = odd if isinstance(odd, bytes) else json.dumps(address).encode()
    store = HashStore()
    store.set("group/address/0", said.decode(errors="surrogateescape") if odd != b"\xff" else "{")
    with pytest.raises(rw.CollectiveError, match="the address of rank 10 in the store cannot be read") as refused:
        connected(1, store, size=2, one_host=True)
    assert str(refused.value).isprintable()


def test_a_store_that_fails_is_an_error_of_ours() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    del store
    registry = GroupRegistry(
        rank=1,  # which asks for the address of rank 0
        device=torch.device("cpu"),
        timeout=100.0,
        check=False,
        one_host=True,
        store=lambda: client,
        own_address=lambda: "127.0.0.1",
    )
    with pytest.raises(rw.CollectiveError, match="the store of the ranks failed"):
        registry.connect("group", range(2))


def test_members_that_do_not_come_are_named() -> None:
    store = HashStore()
    (error,) = in_threads(lambda place: connected(place, store, timeout=0.3), size=1)
    assert isinstance(error, rw.CollectiveTimeoutError)
    assert "ranks 11-12 did not connect to rank 10 in 0.3 s" in str(error)

    def check(awaited: Callable[[], Sequence[int]]) -> None:
        assert list(awaited()) == [11, 12]
        raise rw.CollectiveError("rank 12 is gone")

    (error,) = in_threads(lambda place: connected(place, HashStore(), check_alive=check), size=1)
    assert str(error) == "rank 12 is gone"


def test_nothing_is_left_open_when_members_do_not_come() -> None:
    gc.collect()  # what earlier tests have left goes now, and not while descriptors are counted
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all that is wanted
    (error,) = in_threads(lambda place: connected(place, HashStore(), timeout=0.2), size=1)
    assert isinstance(error, rw.CollectiveTimeoutError)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_members_connect_that_have_many_files_open() -> None:
    """select() cannot wait for descriptors above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    store = HashStore()
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            files.enter_context(Path(os.devnull).open())
        meshes = in_threads(lambda place: connected(place, store))
        for mesh in meshes:
            mesh.close("done")


def test_a_forked_child_does_not_keep_a_rank_alive(meshes: list[Mesh]) -> None:
    """What a data loader's worker inherits would hide that its rank has died."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)  # live on
        os._exit(0)
    meshes[2].abandon()
    errors = in_threads(lambda place: swap(meshes[place], [b""] * SIZE) if place < 2 else None)[:2]
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    for error in errors:
        assert isinstance(error, rw.CollectiveError)
        place = "" if meshes[0].same_host else f" on {socket.gethostname()}"
        assert f"rank 12{place} is gone: its connection closed" in str(error)
