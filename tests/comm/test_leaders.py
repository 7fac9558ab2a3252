"""Leaders of hosts of which one is late, has died, or ends while others wait. Members are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from rankwise._comm.control import tree
from rankwise._comm.control.hosts_channel import HostsChannel
from rankwise._comm.control.links import connect as connecting
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Verdict
from rankwise.errors import CollectiveError, CollectiveTimeoutError
from tests.comm.members import Member, agree, assert_connected, connect, failed, in_threads, open_group
from tests.lanes import variants

# Three hosts with a page each, which form a chain: member 0 leads 0 and 1, member 2 leads 2 and 3, member 4 leads 4, 5.
SIZE = 6


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    """The members of the group of all ranks, connected."""
    monkeypatch.setattr(connecting, "network_id", lambda: str(int(threading.current_thread().name) // 2))
    monkeypatch.setattr(tree, "FAN_OUT", 1)
    store = HashStore()
    links: list[Links] = in_threads(lambda member: connect(member, store, SIZE), SIZE)
    members = open_group(links, ranks=range(10, 10 + SIZE))
    assert all(isinstance(member.channel, HostsChannel) for member in members)
    assert_connected(members)
    yield members
    for member in members:
        member.leave("the test has ended")


def before_sending(member: Member, receiver: int, wait: Callable[[], None]) -> None:
    """Call a function before a leader sends the calls of its host, or the verdict, to another leader."""
    peer = member.links.peer(10 + receiver)
    post = peer.post

    def delayed_post(frame: Frame) -> None:
        if frame.kind in (FrameKind.CALLS, FrameKind.VERDICT):
            wait()
        post(frame)

    peer.post = delayed_post  # type: ignore[method-assign]


def kill(members: list[Member], dead: int) -> None:
    """Close the connections of a member, without a frame, and let its host find it dead, as its end does."""
    for peer in members[dead].links._peers.values():
        assert peer.connection is not None
        peer.connection.close()
    for member in members:
        page = member.links.page
        if page is not None and 10 + dead in page.ranks and member is not members[dead]:
            page.dead.add(page.ranks.index(10 + dead))
            member.links.loop.interrupt()
    if dead % 2:  # in place of the witness of its host, whose process has not ended
        members[dead - 1].links.board.mark_gone(10 + dead, "is gone")


def test_only_leaders_send_frames_along_the_tree(group: list[Member]) -> None:
    sent: list[tuple[int, int, FrameKind]] = []
    for own, member in enumerate(group):
        for peer in member.links._peers.values():

            def post(
                frame: Frame, post: Callable[[Frame], None] = peer.post, way: tuple[int, int] = (own, peer.rank - 10)
            ) -> None:
                sent.append((*way, frame.kind))
                post(frame)

            peer.post = post  # type: ignore[method-assign]
    in_threads(lambda member: agree(group[member]), SIZE)
    up = [(4, 2, FrameKind.CALLS), (2, 0, FrameKind.CALLS)]
    down = [(0, 2, FrameKind.VERDICT), (2, 4, FrameKind.VERDICT)]
    assert sent == up + down
    sent.clear()
    in_threads(lambda member: agree(group[member], read=[1] if member == 5 else []), SIZE)
    assert sorted(sent) == sorted([*up, *down, (0, 2, FrameKind.CALLS), (2, 4, FrameKind.CALLS)])


def test_a_member_that_has_ended_after_the_exchange_is_not_missed(group: list[Member]) -> None:
    """The verdict comes after the news of its end where a leader is slow."""
    has_left = threading.Event()

    def wait() -> None:
        assert has_left.wait(100)
        time.sleep(0.3)

    before_sending(group[2], 4, wait)

    def exchange(member: int) -> Verdict:
        verdict = agree(group[member])
        if member == 1:
            group[1].leave("has ended")
            has_left.set()
        return verdict

    assert [type(result) for result in in_threads(exchange, SIZE)] == [Verdict] * SIZE


@pytest.mark.parametrize("dead", range(SIZE))
def test_the_end_of_a_member_is_noticed_by_all(group: list[Member], dead: int) -> None:
    def exchange(member: int) -> Verdict | None:
        if member == dead:
            time.sleep(0.2)
            kill(group, dead)
            return None
        return agree(group[member])

    for member, result in enumerate(in_threads(exchange, SIZE)):
        if member != dead:
            assert isinstance(result, CollectiveError)
            assert f"rank {10 + dead}" in str(result)
            assert "is gone" in str(result)


@pytest.mark.parametrize("missing", variants(range(SIZE), fast={0, 2, 5}))
def test_only_missing_members_are_named_at_a_timeout(group: list[Member], missing: int) -> None:
    ended = threading.Barrier(SIZE)

    def exchange(member: int) -> Any:
        try:
            if member == missing:
                ended.wait(100)
            return agree(group[member], timeout=1.0)
        except CollectiveError as error:
            return error
        finally:
            if member != missing:
                ended.wait(100)

    for error in in_threads(exchange, SIZE):
        assert isinstance(error, CollectiveTimeoutError)
        assert [rank for rank in range(10, 10 + SIZE) if f"rank {rank}" in str(error)] == [10 + missing]
    assert_connected(group)


def test_a_failure_behind_a_leader_that_is_late_is_raised_at_once(group: list[Member]) -> None:
    """It is on the board. The leader raises too when it comes, and the next exchange works."""
    ended = threading.Barrier(SIZE - 1)

    def exchange(member: int) -> Any:
        if member == 5:
            with group[5].channel.held():
                group[5].channel.post(failed(group[5]), timeout=100.0)
            return None
        try:
            if member == 2:
                ended.wait(100)
            return agree(group[member])
        except CollectiveError as error:
            return error
        finally:
            if member != 2:
                ended.wait(100)

    errors = in_threads(exchange, SIZE)
    assert errors.pop() is None
    assert ["rank 15" in str(error) and "ValueError" in str(error) for error in errors] == [True] * (SIZE - 1)
    assert_connected(group)
    assert all(not member.links.board._notes for member in group), "notes were deleted"
