"""The page of a host: rings, memory, and channels that are closed while they are used. Members are threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise._comm.control.page.layout import RING_ENTRIES
from rankwise._comm.control.page.meeting import PageMeeting
from rankwise._comm.control.page.memory import PageMemory
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Frame, FrameKind
from tests.comm.members import RANKS, SIZE, Member, agree, assert_connected, failed, in_threads, open_group

pytestmark = pytest.mark.parametrize("route", ["page"], indirect=True)


def fail(member: Member, traceback: str = "trace") -> None:
    """Raise in a call, as a rank does that catches the exception."""
    with member.channel.held():
        member.channel.post(failed(member, traceback=traceback), timeout=100.0)


def memory_bytes(member: Member) -> int:
    """Return how much memory the page takes."""
    page = member.links.page
    assert page is not None
    return os.fstat(page._memory.descriptor).st_blocks * 512


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:rankwise")


def held() -> tuple[int, int, int]:
    """Return the numbers of maps of pages, descriptors and threads of this process."""
    return num_mappings(), len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


@pytest.mark.parametrize("odd", range(SIZE))
@pytest.mark.parametrize("traceback", [10, 32_000])
def test_failures_of_a_member_that_is_ahead_are_read_in_order(group: list[Member], odd: int, traceback: int) -> None:
    """It makes its calls without waiting for the others, and goes on to something else, where nothing wakes it."""
    for _ in range(100):
        fail(group[odd], "x" * traceback)

    def catch_up(member: int) -> list[tuple[int, int]]:
        if member == odd:
            return []
        errors = []
        for _ in range(100):
            try:
                agree(group[member], timeout=20.0)
            except rw.RemoteRankError as error:
                errors.append((error.rank, len(error.traceback)))
        return errors

    found = in_threads(catch_up)
    for member in range(SIZE):
        assert member == odd or [rank for rank, _ in found[member]] == [10 + odd] * 100, found[member]
    assert_connected(group)


def test_timeouts_of_members_that_are_ahead_are_raised_on_the_late_one(group: list[Member]) -> None:
    for late in range(SIZE):
        for _ in range(5):
            in_threads(lambda member: member == late or agree(group[member], timeout=0.02))  # noqa: B023
        for _ in range(5):
            (error,) = in_threads(lambda _: agree(group[late], timeout=20.0), 1)  # noqa: B023
            assert isinstance(error, rw.CollectiveTimeoutError), error
        assert_connected(group)


def test_a_member_that_is_too_far_ahead_leaves_the_group(group: list[Member]) -> None:
    with group[1].channel.held(), pytest.raises(rw.CollectiveError, match="this rank has left the group"):
        for _ in range(2 * RING_ENTRIES):
            group[1].channel.post(failed(group[1]))


def test_groups_that_are_closed_leave_nothing(group: list[Member]) -> None:
    """Also after failures, timeouts and large bodies, and where a member closes before another has used the group."""
    links = [member.links for member in group]
    assert_connected(group)
    before = memory_bytes(group[0]), held()
    for number in range(1, 61):
        opened = open_group(links, number)
        if number % 3:
            odd = number % SIZE
            fail(opened[odd], "x" * 32_000)
            in_threads(lambda member: member == odd or agree(opened[member]))  # noqa: B023
            in_threads(lambda member: agree(opened[member], bytes(20_000), read=range(SIZE)))  # noqa: B023
            in_threads(lambda member: member == 0 or agree(opened[member], bytes(20_000), timeout=0.01))  # noqa: B023
            for _ in range(5):
                fail(opened[1], "x" * 9_000)
        for member in opened:
            member.channel.close("closed the group")
    assert memory_bytes(group[0]) <= before[0] + 4096  # of the directory
    assert held() == before[1]
    assert_connected(group)


def test_many_groups_take_few_descriptors_and_leave_nothing(group: list[Member]) -> None:
    links = [member.links for member in group]
    assert_connected(group)
    before = memory_bytes(group[0]), held()
    opened = [open_group(links, number) for number in range(1, 301)]
    mappings, descriptors, threads = (now - earlier for now, earlier in zip(held(), before[1], strict=True))
    assert 0 < mappings <= SIZE, "each rank has mapped a second area"
    assert (descriptors, threads) == (mappings, 0)
    for members in (opened[0], opened[-1], opened[100]):
        assert_connected(members)
    for members in opened[::2] + opened[1::2]:
        for member in members:
            member.channel.close("closed the group")
    assert memory_bytes(group[0]) <= before[0] + 2 * 4096  # of the directory
    assert held() == before[1]
    assert_connected(group)


def test_a_group_whose_memory_cannot_be_mapped_is_no_group(
    group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections are closed with the last of the other groups."""

    def refuse(*_: object) -> memoryview:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(PageMemory, "open_window", refuse)
        for own in (member.links for member in group):
            assert own.page is not None
            with pytest.raises(rw.CollectiveError, match="cannot be mapped: Cannot allocate memory"):
                PageChannel(1, RANKS, own, own.page)
    assert_connected(group)
    for member in group:
        member.leave("ended")
        assert member.links.channels == {}
        with pytest.raises(OSError, match="Bad file descriptor"):
            memory_bytes(member)


def test_a_verdict_counts_that_came_while_a_member_looked_for_problems(
    group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader enters the exchange, publishes and leaves between two looks of a member that came before it."""
    late: Any = group[1].channel
    is_looking, leader_left = threading.Event(), threading.Event()
    has_problem = late._window.has_problem

    def wait_and_look(sequence: int) -> bool:
        is_looking.set()
        assert leader_left.wait(200)
        found: bool = has_problem(sequence)
        return found

    monkeypatch.setattr(late._window, "has_problem", wait_and_look)

    def take_part(member: int) -> None:
        if member == 0:
            assert is_looking.wait(200)
        agree(group[member])
        if member == 0:
            group[0].channel.close("closed the group")
            leader_left.set()

    assert in_threads(take_part) == [None] * SIZE


def test_a_verdict_is_read_after_the_leader_has_left(group: list[Member]) -> None:
    """The leader is three calls ahead, so its verdicts are in the ring."""
    assert isinstance(group[0].channel, PageChannel)
    for _ in range(4):
        fail(group[0], "x" * 20_000)
    group[0].leave("ended")
    for _ in range(4):
        for member in (1, 2):
            with pytest.raises(rw.RemoteRankError):
                agree(group[member], timeout=20.0)


def test_what_others_look_for_is_written_behind_a_fence(group: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can wait for a processor to reorder memory, so this looks at what is written when a fence is passed."""
    assert isinstance(group[0].channel, PageChannel)
    window = group[0].channel._window
    meeting, fence, missing = PageMeeting(window, 0, 0.0), window.fence, PageMeeting.missing
    steps: list[object] = []

    def pass_fence() -> None:
        steps.append((b"the body" in bytes(window._view), window.has_arrived(0, 1), window.met[0]))
        fence()

    def look(own: PageMeeting) -> list[int]:
        steps.append("looks for the others")
        return missing(own)

    def pause(_: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(window, "fence", pass_fence)
    monkeypatch.setattr(PageMeeting, "missing", look)
    window.write(0, Frame(FrameKind.CALL, "all_reduce", body=b"the body", sequence=1), has_room=True)
    with pytest.raises(TimeoutError):
        meeting.meet(pause)
    assert steps == [(True, False, 0), (True, True, 1), "looks for the others"]
