"""Frames that go through the leaders of hosts, of which one is late, has died, or ends while others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from rankwise._comm.control.links import connect as connecting
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Verdict
from rankwise.errors import CollectiveError, CollectiveTimeoutError
from tests.comm.conftest import no_page
from tests.comm.members import Member, agree, assert_connected, connect, in_threads, open_group
from tests.lanes import variants

# Two hosts: members 0 to 2 are on the first one, which 0 leads; 3 to 5 are on the second one, which 3 leads.
SIZE = 6


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    """The members of the group of all ranks, connected."""
    monkeypatch.setattr(connecting, "network_id", lambda: str(int(threading.current_thread().name) // 3))
    monkeypatch.setattr(connecting, "share_page", no_page)
    store = HashStore()
    links: list[Links] = in_threads(lambda member: connect(member, store, SIZE), SIZE)
    members = open_group(links, ranks=range(10, 10 + SIZE))
    assert_connected(members)
    yield members
    for member in members:
        member.leave("the test has ended")


def before_forwarding(member: Member, receiver: int, wait: Callable[[], None]) -> None:
    """Call a function before a leader sends the frames of its host, or the verdict, to another member."""
    peer = member.links.peer(10 + receiver)
    post = peer.post

    def delayed_post(frame: Frame) -> None:
        if frame.kind in (FrameKind.BUNDLE, FrameKind.VERDICT):
            wait()
        post(frame)

    peer.post = delayed_post  # type: ignore[method-assign]


def kill(member: Member) -> None:
    """Close the connections of a member, without a frame, as its end does."""
    for other in range(10, 10 + SIZE):
        if other != member.links.rank:
            member.links.peer(other).connection.close()


def test_frames_go_through_the_leaders(group: list[Member]) -> None:
    sent: list[tuple[int, int, FrameKind]] = []
    for own, member in enumerate(group):
        for other in range(SIZE):
            if other == own:
                continue
            peer = member.links.peer(10 + other)

            def post(
                frame: Frame, post: Callable[[Frame], None] = peer.post, way: tuple[int, int] = (own, other)
            ) -> None:
                sent.append((*way, frame.kind))
                post(frame)

            peer.post = post  # type: ignore[method-assign]
    in_threads(lambda member: agree(group[member]), SIZE)
    ways = [(own, other) for own, other, kind in sent if kind is not FrameKind.ARRIVED]
    up = [(1, 0), (2, 0), (4, 3), (5, 3), (3, 0)]
    assert sorted(ways) == sorted(up + [(leader, member) for member, leader in up])
    assert_connected(group)
    read = [(own, other) for own, other, kind in sent[len(ways) :] if kind is FrameKind.BUNDLE]
    assert sorted(read) == sorted([(3, 0)] + [(leader, member) for member, leader in up])


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_member_that_has_left_after_the_exchange_is_not_missed(group: list[Member], is_announced: bool) -> None:
    """Its frame was forwarded, and arrives after its farewell where a leader is slow."""
    has_left = threading.Event()

    def wait() -> None:
        assert has_left.wait(100)
        time.sleep(0.3)

    before_forwarding(group[3], 5, wait)

    def exchange(member: int) -> Verdict:
        if member == 1 and is_announced:
            time.sleep(0.2)  # the others announce themselves meanwhile
        verdict = agree(group[member])
        if member == 4:
            group[4].leave("has ended")
            has_left.set()
        return verdict

    assert [type(result) for result in in_threads(exchange, SIZE)] == [Verdict] * SIZE


def test_a_member_that_has_died_after_the_exchange_is_not_missed(group: list[Member]) -> None:
    """Its leader waits in the exchange, and decides."""
    has_died = threading.Event()

    def wait() -> None:
        assert has_died.wait(100)
        time.sleep(0.5)

    before_forwarding(group[3], 5, wait)

    def exchange(member: int) -> Verdict:
        if member == 1:
            time.sleep(0.3)  # the leaders announce themselves meanwhile
        verdict = agree(group[member])
        if member == 4:
            kill(group[4])
            has_died.set()
        return verdict

    assert [type(result) for result in in_threads(exchange, SIZE)] == [Verdict] * SIZE


@pytest.mark.parametrize("dead", [0, 1, 3, 4])
def test_the_end_of_a_member_is_noticed_by_all(group: list[Member], dead: int) -> None:
    def exchange(member: int) -> Verdict | None:
        if member == dead:
            time.sleep(0.2)
            kill(group[dead])
            return None
        return agree(group[member])

    for member, result in enumerate(in_threads(exchange, SIZE)):
        if member != dead:
            assert isinstance(result, CollectiveError)
            assert f"rank {10 + dead}" in str(result)
            assert "is gone" in str(result)


def test_a_leader_that_dies_before_it_forwards_is_noticed(group: list[Member]) -> None:
    """It has announced itself, so nobody misses its frame alone."""

    def die() -> None:
        kill(group[3])
        raise RuntimeError("dead")

    before_forwarding(group[3], 0, die)

    def exchange(member: int) -> Verdict:
        if member == 4:
            time.sleep(0.3)
        return agree(group[member])

    for member, result in enumerate(in_threads(exchange, SIZE)):
        if member != 3:
            assert isinstance(result, CollectiveError)
            assert "rank 13" in str(result)


@pytest.mark.parametrize("missing", variants([1, 3], fast=[3]))
def test_only_missing_members_are_named_at_a_timeout(group: list[Member], missing: int) -> None:
    def exchange(member: int) -> Verdict:
        if member == missing:
            time.sleep(1.5)
        return agree(group[member], timeout=1.0)

    for error in in_threads(exchange, SIZE):
        assert isinstance(error, CollectiveTimeoutError)
        assert [rank for rank in range(10, 10 + SIZE) if f"rank {rank}" in str(error)] == [10 + missing]
    assert_connected(group)


def test_a_stopped_leader_is_named_at_a_timeout(group: list[Member]) -> None:
    """Its host has not got the last frame, which the other host has: that one goes on to the next exchange."""
    has_ended = threading.Event()

    def wait() -> None:
        assert has_ended.wait(100)

    before_forwarding(group[3], 4, wait)

    def exchange(member: int) -> Verdict:
        if member == 1:
            time.sleep(0.3)
        if member in (4, 5):
            try:
                return agree(group[member], timeout=1.0)
            finally:
                if member == 4:
                    has_ended.set()
        agree(group[member], timeout=1.0)
        return agree(group[member], timeout=1.0)

    errors = in_threads(exchange, SIZE)
    assert isinstance(errors[4], CollectiveTimeoutError)
    assert "Missing: rank 13" in str(errors[4])
