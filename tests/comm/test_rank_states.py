"""The state of each rank as another one knows it: the calls that it is in. Members are threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest

import rankwise as rw
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.ongoing_calls import OngoingCall
from tests.comm.members import CALL, Member, agree, assert_connected, failed, in_threads, open_group


def calls(links: Links, rank: int) -> list[OngoingCall]:
    """Return the calls that a rank is in, after what has arrived was handled."""
    links.loop.wait(links.loop.num_events, 0.0)
    return links.ongoing_calls(rank)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_calls_of_a_rank_are_known_until_it_has_finished_them(links: list[Links], group: list[Member]) -> None:
    """Its threads are in calls of two groups; both ranks are members of both."""
    subgroup = open_group(links, 1, [10, 11])
    assert_connected(group)
    assert_connected(subgroup)
    waiting = [threading.Thread(target=agree, args=[member]) for member in (group[1], subgroup[1])]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(calls(links[0], 11)) == 2)
    found = sorted(calls(links[0], 11), key=lambda call: call.group)
    assert [(call.text, call.group, list(call.ranks), call.sequence) for call in found] == [
        (CALL, 0, [10, 11, 12], 2),
        (CALL, 1, [10, 11], 2),
    ]
    assert all(0 <= call.seconds < 200 for call in found)
    assert {(call.group, call.sequence) for call in calls(links[1], 11)} == {(0, 2), (1, 2)}, "its own"
    wait_until(lambda: [call.group for call in calls(links[2], 11)] == [0])  # it is no member of the other group
    assert calls(links[0], 10) == calls(links[0], 12) == []
    in_threads(lambda member: [agree(group[0]), agree(subgroup[0])] if member == 0 else member == 2 and agree(group[2]))
    for thread in waiting:
        thread.join(200)
    wait_until(lambda: not any(calls(own, rank) for own in links for rank in (10, 11, 12)))
    for member in subgroup:
        member.channel.close("closed the group")
    assert all(list(own.channels) == [0] for own in links)


def test_the_error_of_a_timeout_has_the_call_of_another_group(links: list[Links], group: list[Member]) -> None:
    subgroup = open_group(links, 1, [10, 11])
    waiting = threading.Thread(target=agree, args=[subgroup[1]])
    waiting.start()
    wait_until(lambda: len(calls(links[0], 11)) == 1)
    with pytest.raises(rw.CollectiveTimeoutError) as raised:
        agree(group[0], timeout=0.05)
    assert re.search(
        r"Missing: rank 11( on \S+)?, which has made no call of this group yet, now in all_reduce at train\.py:88 "
        r"in the group of ranks 10-11, for \d+\.\d s; rank 12( on \S+)?, which has made no call of this group yet$",
        str(raised.value),
    )
    agree(subgroup[0])
    waiting.join(200)
    with pytest.raises(rw.CollectiveTimeoutError) as raised:
        agree(group[0], timeout=0.05)
    assert "now in" not in str(raised.value)
    for member in subgroup:
        member.channel.close("closed the group")


def test_a_rank_that_failed_or_left_is_in_no_call(links: list[Links], group: list[Member]) -> None:
    subgroup = open_group(links, 1, [10, 11])
    with subgroup[1].channel.held():
        subgroup[1].channel.post(failed(subgroup[1]), timeout=100.0)
    in_threads(lambda member: member == 1 and agree(group[1], timeout=0.05))
    wait_until(lambda: not any(calls(own, 11) for own in links))
    subgroup[1].channel.close("closed the group")
    wait_until(lambda: not calls(links[0], 11))  # that it waits no longer may be known a moment after its wait is
    subgroup[0].channel.close("closed the group")


@pytest.mark.slow
@pytest.mark.parametrize("route", ["page", "pages of hosts"], indirect=True)
def test_calls_are_read_while_groups_are_used_and_closed(links: list[Links], group: list[Member]) -> None:
    """By another thread, which reads what the members write at the same time."""
    ended = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not ended.is_set():
            seen.update(call.text for own in links for rank in (10, 11, 12) for call in own.ongoing_calls(rank))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 31):
        opened = open_group(links, number)
        for _ in range(3):
            assert_connected(opened)
        for member in opened:
            member.channel.close("closed the group")
    ended.set()
    reader.join(200)
    assert seen <= {CALL}
    assert_connected(group)
