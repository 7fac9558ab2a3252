"""Connections that are made when they are needed: who connects at first, frames, data, and what fails."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.distributed import HashStore

import rankwise as rw
from rankwise._comm.control.branch import units_of
from rankwise._comm.control.links import connect as connecting
from rankwise._comm.control.links import connector, sockets
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import CLOSED, Peer
from rankwise._comm.control.links.socket_flow import SocketFlow
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.tree import FAN_OUT, Tree
from rankwise._net.job_secret import JobSecret
from rankwise._net.rank_proof import new_hello
from tests.comm.conftest import network_of_a_pair, no_page
from tests.comm.members import connect, in_threads

GROUP = 7


class Channel:
    """Stands for a channel: a rank takes data of its open groups alone."""

    def ongoing_call(self, rank: int) -> None: ...


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "share_page", no_page)


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a host of its own."""
    monkeypatch.setattr(connecting, "network_id", lambda: threading.current_thread().name)


@contextlib.contextmanager
def connected(size: int, **replaced: Any) -> Iterator[list[Links]]:
    """Connect the ranks of a session, of which all have opened a group."""
    store = HashStore()
    links: list[Links] = in_threads(lambda group_rank: connect(group_rank, store, size, **replaced), size)
    try:
        for own in links:
            assert isinstance(own, Links), own
            own.channels[GROUP] = Channel()
        yield links
    finally:
        for own in links:
            if isinstance(own, Links):
                own.close()


@pytest.fixture(params=["one host", "several hosts"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Links]]:
    """Three connected ranks."""
    if request.param == "several hosts":
        request.getfixturevalue("several_hosts")
    with connected(3) as links:
        yield links


def turn(links: list[Links], is_over: Callable[[], bool]) -> None:
    """Let all ranks handle their events until a condition holds."""
    deadline = time.monotonic() + 100
    while not is_over():
        assert time.monotonic() < deadline
        for own in links:
            own.wait(list(own._peers.values()), own.loop.num_events, 0.0)


def move(
    links: Links, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], group: int = GROUP
) -> dict[int, bytearray]:
    """Transfer data, and return what came; raises ConnectionError if a rank is lost for a while."""
    received = {rank: bytearray(length) for rank, length in incoming.items()}
    buffers = {rank: memoryview(buffer) for rank, buffer in received.items()}
    flow = SocketFlow(links, group, {rank: memoryview(data) for rank, data in outgoing.items()}, buffers)
    since = 0.0
    try:
        while flow.pending:
            if not flow.step() and flow.pending:
                lost = {rank: why for rank in flow.pending if (why := flow.lost(rank))}
                since = (since or time.monotonic()) if lost else 0.0
                if lost and time.monotonic() > since + 0.5:
                    raise ConnectionError(f"{lost}")
                flow.wait(0.1)
    finally:
        flow.end()
    return received


def test_leaders_connect_along_a_tree(several_hosts: None) -> None:
    size = 40
    with connected(size) as links:
        tree = Tree(size)
        for own, each in enumerate(links):
            assert [each.units.leader(unit) for unit in range(len(each.units))] == list(range(10, 10 + size))
            assert each.unit_of(10 + own) == own
            parent = tree.parent(own)
            others = {10 + child for child in tree.children(own)} | (set() if parent is None else {10 + parent})
            assert each._peers.keys() == others
            assert all(peer.is_connected for peer in each._peers.values())


def test_ranks_of_a_host_without_a_page_are_units_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "network_id", network_of_a_pair)
    with connected(5) as links:
        for each in links:
            assert units_of(range(10, 15), each) == [[0], [1], [2], [3], [4]]
            assert [each.host(rank) for rank in range(10, 15)] == ["0", "0", "1", "1", "2"]
            assert each.host_name(12) == socket.gethostname()


def test_ranks_of_a_host_with_a_page_are_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page:
        processes: ClassVar[dict[int, int]] = {}

        def register(self, loop: object) -> None: ...
        def close(self) -> None: ...

    def share_page(*_: object, ranks: list[int], **_more: object) -> Page | None:
        return Page() if ranks == [10, 13] else None

    monkeypatch.setattr(connecting, "network_id", lambda: str(int(threading.current_thread().name) % 3))
    monkeypatch.setattr(connecting, "share_page", share_page)
    with connected(6) as links:
        for each in links:
            assert units_of(range(10, 16), each) == [[0, 3], [1], [2], [4], [5]]
            assert [each.units.leader(unit) for unit in range(len(each.units))] == [10, 11, 12, 14, 15]
            assert [each.unit_of(rank) for rank in range(10, 16)] == [0, 1, 2, 0, 3, 4]
            assert (each.page is None) is (each.rank not in {10, 13})
        assert links[3]._peers == {}


def test_a_session_of_many_ranks_takes_few_sockets(several_hosts: None) -> None:
    size = 100
    with connected(size) as links:
        for own in links:
            opened = [*own.connector._listeners, *own.connector.made.values(), *own.connector._taken]
            opened += [peer.connection for peer in own._peers.values() if peer.connection is not None]
            assert len(opened) <= 2 + 1 + FAN_OUT
        for size_before, own in ((3, links[3]), (1, links[99])):
            assert len(own._peers) <= 1 + FAN_OUT, size_before


def test_ranks_of_one_host_without_a_page_connect_along_the_tree() -> None:
    with connected(3) as links:
        assert [list(own._peers) for own in links] == [[11, 12], [10], [10]]
        assert [units_of(range(10, 13), own) for own in links] == [[[0], [1], [2]]] * 3


def frame(text: str) -> Frame:
    return Frame(FrameKind.VERDICT, text, group=GROUP, sequence=1)


def test_what_is_posted_before_there_is_a_connection_arrives(three: list[Links]) -> None:
    """In both directions, in order."""
    low, high = three[1], three[2]
    for number in range(5):
        low.peer(12).post(Frame(FrameKind.VERDICT, f"down {number}", group=GROUP, sequence=number))
    high.peer(11).post(Frame(FrameKind.VERDICT, "up", group=GROUP, sequence=1, body=bytes(3_000_000)))
    assert not low.peer(12).is_connected
    down, up = high.peer(11).inbox(GROUP), low.peer(12).inbox(GROUP)
    turn([low, high], lambda: len(down.verdicts) == 5 and 1 in up.verdicts)
    assert [down.verdicts[number].call for number in range(5)] == [f"down {number}" for number in range(5)]
    assert len(up.verdicts[1].body) == 3_000_000


def test_each_pair_has_one_connection(three: list[Links]) -> None:
    """Though both sides ask for it, again and again, in threads."""

    def ask(group_rank: int) -> None:
        own = three[group_rank % 3]
        for _ in range(100):
            for other in (10, 11, 12):
                if other != own.rank:
                    own.wait([own.peer(other)], own.loop.num_events, 0.001)

    assert in_threads(ask, 6) == [None] * 6
    turn(three, lambda: all(peer.is_connected for own in three for peer in own._peers.values()))
    names = [
        {peer.connection.getsockname() for peer in own._peers.values() if peer.connection is not None} for own in three
    ]
    assert [own._peers.keys() for own in three] == [{11, 12}, {10, 12}, {10, 11}]
    assert all(not peer.lost_reason for own in three for peer in own._peers.values()), names


def test_data_moves_in_both_directions(three: list[Links]) -> None:
    """Large and small, to one and to all, one transfer after the other."""
    size = 30_000_000

    def run(group_rank: int) -> list[bool]:
        own = three[group_rank]
        others = [rank for rank in (10, 11, 12) if rank != own.rank]
        correct = []
        for length in (size, *[17 + number for number in range(300)], 1_000_000):
            came = move(own, {rank: bytes([own.rank]) * length for rank in others}, dict.fromkeys(others, length))
            correct.append(all(came[rank] == bytes([rank]) * length for rank in others))
        return correct

    assert in_threads(run) == [[True] * 302] * 3
    assert all(len(own.connector.made) == 2 and not own.connector._taken for own in three)


@pytest.mark.soak(20)
def test_data_of_several_groups_moves_at_once(three: list[Links], seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - a test
    lengths = [[generator.choice([1, 1000, 300_000]) for _ in range(20)] for _ in range(4)]
    for own in three:
        own.channels.update(dict.fromkeys(range(4), Channel()))

    def run(thread: int) -> bool:
        own, group = three[thread % 3], thread // 3
        others = [rank for rank in (10, 11, 12) if rank != own.rank]
        for number, length in enumerate(lengths[group]):
            content = bytes([group, number % 256])
            sent = {rank: content + bytes(length) for rank in others}
            came = move(own, sent, dict.fromkeys(others, length + 2), group)
            assert all(each[:2] == content for each in came.values())
        return True

    assert in_threads(run, 12) == [True] * 12
    for own in three:
        own.leave_group(2)
        assert {group for _, group in own.connector.made} == {0, 1, 3}


@pytest.mark.parametrize("victim", [10, 12])
def test_a_rank_that_ends_in_the_middle_is_lost(three: list[Links], victim: int) -> None:
    own = three[1]

    def run(thread: int) -> None:
        if thread:
            move(own, {victim: bytes(1 << 24)}, {victim: 1 << 24})
        flow = SocketFlow(three[victim - 10], GROUP, {11: memoryview(bytes(100_000))}, {})
        while flow.pending:
            flow.step()
            flow.wait(0.1)
        three[victim - 10].close()

    _, error = in_threads(run, 2)
    assert isinstance(error, ConnectionError), error
    assert str(error) == str({victim: CLOSED})
    assert not own.connector._taken
    assert not own.connector.made


def test_a_transfer_after_one_that_was_interrupted_has_a_new_connection(three: list[Links]) -> None:
    """Whichever side was interrupted, and whether the other side had finished, was in the middle, or had not begun."""
    for interrupted, other in ((1, 2), (2, 1)):
        broken, whole = three[interrupted], three[other]
        for sent in (0, 1000, 1 << 24):
            gate = threading.Barrier(2)

            def run(thread: int) -> bytes:
                if thread:
                    if sent:  # noqa: B023
                        with contextlib.suppress(ConnectionError):
                            move(whole, {broken.rank: bytes(sent)}, {})  # noqa: B023
                    gate.wait(100)  # noqa: B023
                    return bytes(move(whole, {}, {broken.rank: 3})[broken.rank])  # noqa: B023
                if sent:  # noqa: B023
                    buffer = memoryview(bytearray(sent + 1))  # noqa: B023
                    flow = SocketFlow(broken, GROUP, {}, {whole.rank: buffer})  # noqa: B023
                    while not flow.step():
                        flow.wait(0.1)
                    flow.end()
                gate.wait(100)  # noqa: B023
                move(broken, {whole.rank: b"new"}, {})  # noqa: B023
                return b"new"

            assert in_threads(run, 2) == [b"new", b"new"], (interrupted, sent)


def test_a_rank_that_is_gone_cannot_be_reached(three: list[Links]) -> None:
    three[1].listen()
    three[1].close()
    peer = three[2].peer(11)
    peer.post(frame("call"))
    turn([three[2]], lambda: bool(peer.lost_reason))
    assert peer.lost_reason.startswith("cannot be reached at ")
    assert peer.lost_reason.endswith(": Connection refused")
    assert peer.num_unsent == 0
    with pytest.raises(ConnectionError, match=r"cannot be reached at .*: Connection refused"):
        move(three[2], {11: b"x"}, {})


def test_what_is_no_rank_is_told_apart(several_hosts: None) -> None:
    """It listens at the address of one."""
    with connected(3) as links, socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        address = {"local": "x", "remote": "127.0.0.1", "port": port, "secret": "00" * sockets.SECRET_BYTES}
        links[2].connector._store.set("address/11", json.dumps(address))
        peer = links[2].peer(11)

        def answer(thread: int) -> None:
            if thread:
                turn([links[2]], lambda: bool(peer.lost_reason))
                return
            with stranger.accept()[0] as connection:
                connection.sendall(bytes(100))
                connection.recv(100)

        assert in_threads(answer, 2) == [None, None]
    assert peer.lost_reason == (
        f"cannot be reached at 127.0.0.1:{port}: what listens there does not prove that it is this rank: it has "
        "another RANKWISE_SECRET, or is another program"
    )


@pytest.mark.parametrize("secrets", [("0" * 32, "1" * 32), (None, "1" * 32)])
def test_ranks_with_other_secrets_do_not_connect(several_hosts: None, secrets: tuple[str | None, str]) -> None:
    store = HashStore()
    keys = [None if text is None else JobSecret(text, "a test") for text in secrets]
    errors = in_threads(lambda member: connect(member, store, 2, secret=keys[member], timeout=1.0), 2)
    assert "did not connect to rank 10 in 1 s. 1 connection was closed that was no rank's" in str(errors[0])
    assert "rank 10 cannot be reached at 127.0.0.1:" in str(errors[1])
    assert "it has another RANKWISE_SECRET" in str(errors[1])


def test_a_rank_that_cannot_be_reached_is_an_error_of_joining(several_hosts: None) -> None:
    store = HashStore()
    errors = in_threads(lambda member: connect(member, store, 2, own_address=lambda: "no such host", timeout=1.0), 2)
    assert isinstance(errors[1], rw.CollectiveError)
    assert str(errors[1]).startswith("rank 10 cannot be reached at no such host:")


@pytest.mark.parametrize(
    "greeting", [b"", b"GET / HTTP/1.0\r\n\r\n", new_hello(12, connector.FRAMES), bytes(60)], ids=range(4)
)
def test_strangers_are_not_served(several_hosts: None, greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they delay a rank that connects after them."""
    monkeypatch.setattr("rankwise._net.acceptor.IDENTIFY_SECONDS", 0.3)
    with connected(3) as links:
        address = ("127.0.0.1", links[1].connector._listeners[1].getsockname()[1])
        clients = [socket.create_connection(address) for _ in range(20)]
        for client in clients:
            client.sendall(greeting)
        links[1].peer(12)
        links[2].peer(11).post(frame("call"))
        turn(links, lambda: 1 in links[1].peer(12).inbox(GROUP).verdicts)
        for client in clients:
            client.setblocking(False)
        closed: set[socket.socket] = set()

        def are_closed() -> bool:
            for client in clients:
                with contextlib.suppress(BlockingIOError):
                    try:
                        if not client.recv(100):
                            closed.add(client)
                    except ConnectionResetError:
                        closed.add(client)
            return len(closed) == len(clients)

        turn(links, are_closed)
        assert "20 connections were closed that were no rank's" in links[1].connector.rejected_text()
        for client in clients:
            client.close()


def test_a_second_connection_for_frames_is_refused(several_hosts: None) -> None:
    with connected(3) as links:
        links[0].peer(12)
        again = connector.Connector(
            links[2].loop, store=links[2].connector._store, rank=12, key="address", places=links[2].units.places
        )
        again.expected.add((10, connector.FRAMES))
        again.request(10, connector.FRAMES)

        def is_refused() -> bool:
            again.wait(again.loop.num_events, 0.0)
            made = again.made.get((10, connector.FRAMES))
            return made is not None and connector._has_ended(made)

        turn(links, is_refused)
        again.close()
        assert not links[0].peer(12).lost_reason


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Leave so many file descriptors to this process in a block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        highest = files.enter_context(Path(os.devnull).open()).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
        opened = []
        with contextlib.suppress(OSError):
            while True:
                opened.append(files.enter_context(Path(os.devnull).open()))
        for file in opened[:spare]:
            file.close()
        yield


def test_a_rank_without_descriptors_says_so(three: list[Links]) -> None:
    gc.collect()
    listening = bool(three[1].connector._listeners)
    three[1].listen()
    with few_descriptors(0):
        peer = three[2].peer(11)
        turn([three[2]], lambda: bool(peer.lost_reason))
        assert "Too many open files; raise the limit of file descriptors (ulimit -n)" in peer.lost_reason
        if not listening:
            three[0].peer(11)
            assert "Too many open files; raise the limit of file descriptors" in three[0].peer(11).lost_reason
    with few_descriptors(1):  # one to connect, none to accept
        waiting = three[1].peer(12)
        with pytest.raises(ConnectionError, match=r"it closed the connection|Connection reset|its connection closed"):
            in_turn(three[1], three[2])
        turn([three[1]], lambda: bool(waiting.lost_reason))
        assert "no more ranks can connect: Too many open files" in waiting.lost_reason


def in_turn(low: Links, high: Links) -> None:
    """Transfer data between ranks of which the lower one has no descriptor to accept the connection."""
    flow = SocketFlow(high, GROUP, {low.rank: memoryview(b"x")}, {})
    try:
        deadline = time.monotonic() + 100
        while flow.pending and time.monotonic() < deadline:
            flow.step()
            if why := flow.lost(low.rank):
                raise ConnectionError(why)
            flow.wait(0.01)
            low.wait((), low.loop.num_events, 0.0)
    finally:
        flow.end()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only the count is needed


def test_no_descriptor_stays_open(several_hosts: None) -> None:
    """After connections that were made, those that were not, and those that were on the way when a rank closed."""
    before = descriptors()
    with connected(3) as links:
        in_threads(
            lambda member: member and move(links[member], {23 - links[member].rank: b"x"}, {23 - links[member].rank: 1})
        )
        links[2].peer(11)
        links[1].peer(12)
        SocketFlow(links[1], GROUP, {10: memoryview(b"x")}, {})
        links[1].wait((), links[1].loop.num_events, 0.0)
    assert descriptors() == before
    store = HashStore()
    in_threads(lambda member: connect(member, store, 3, timeout=0.3), 2)  # the third does not come
    assert descriptors() == before


def test_closing_while_connecting_loses_the_peer(three: list[Links]) -> None:
    peer = three[2].peer(11)
    three[1].listen()
    for _ in range(3):
        three[2].wait([peer], three[2].loop.num_events, 0.01)
    three[1].close()
    turn([three[2]], lambda: bool(peer.lost_reason))
    assert "cannot be reached at" in peer.lost_reason
    three[2].close()
    assert isinstance(peer, Peer)
