"""When each member came to the last calls of a group, as others know it."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from rankwise._comm.control.links import connect as connecting
from rankwise._comm.control.page.layout import ARRIVALS
from rankwise.errors import RemoteRankError
from tests.comm.conftest import no_page
from tests.comm.members import CALL, SIZE, Member, agree, connect, failed, in_threads, open_group

LATE = 2


def agree_late(members: list[Member], late: int) -> None:
    """Let all members agree; one comes after all others have."""

    def part(own: int) -> None:
        others = [member for member in range(len(members)) if member != late]
        while own == late and not all(members[other].channel.lock.locked() for other in others):
            pass
        if own == late:
            time.sleep(0.2)  # more than one member may need more than another one to hear of the end of a call
        agree(members[own])

    assert in_threads(part, len(members)) == [None] * len(members)


def last_of(arrivals: list[float]) -> int:
    return max(range(len(arrivals)), key=arrivals.__getitem__)


def test_members_know_when_each_came(group: list[Member], route: str) -> None:
    agree_late(group, LATE)
    agree_late(group, 0)
    if route != "page":  # where the next call tells of the last one
        agree_late(group, 1)
    first, *others = [member.channel.arrivals() for member in group]
    assert [(call, last_of(times)) for call, times in first] == [(CALL, LATE), (CALL, 0)]
    assert others == [first if route == "page" else []] * (SIZE - 1)


def test_a_late_member_is_told_from_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members 3 to 5 are on the second host, whose leader forwards their frames together."""
    monkeypatch.setattr(connecting, "network_id", lambda: str(int(threading.current_thread().name) // 3))
    monkeypatch.setattr(connecting, "share_page", no_page)
    store = HashStore()
    members = open_group(in_threads(lambda member: connect(member, store, 6), 6), ranks=range(10, 16))
    agree_late(members, 5)
    agree_late(members, 4)
    ((_, times),) = members[0].channel.arrivals()
    assert last_of(times) == 5
    for member in members:
        member.leave("the test has ended")


ON_A_HOST = pytest.mark.parametrize("route", ["page"], indirect=True)


@ON_A_HOST
def test_failed_calls_are_left_out_and_old_ones_forgotten(group: list[Member]) -> None:
    agree_late(group, LATE)

    def fail(own: int) -> None:
        if own == LATE:
            with group[own].channel.held():
                group[own].channel.post(failed(group[own]))
            return
        with pytest.raises(RemoteRankError):
            agree(group[own])

    assert in_threads(fail, SIZE) == [None] * SIZE
    assert len(group[0].channel.arrivals()) == 1
    assert in_threads(lambda own: [agree(group[own]) for _ in range(ARRIVALS + 5)] and None, SIZE) == [None] * SIZE

    def look_last(own: int) -> list[tuple[str, list[float]]]:
        """Return the arrivals on a member that others wait for, in the next exchange."""
        channel = group[own].channel
        while own == 0 and not all(channel.ongoing_call(rank) for rank in channel.ranks[1:]):
            pass
        found = channel.arrivals() if own == 0 else []
        agree(group[own])
        return found

    arrivals = in_threads(look_last, SIZE)[0]
    assert ARRIVALS - 3 < len(arrivals) <= ARRIVALS
    means = [sum(times) for _, times in arrivals]
    assert means == sorted(means), "none is of a later exchange"


@ON_A_HOST
def test_a_group_that_is_closed_has_no_arrivals(group: list[Member]) -> None:
    agree_late(group, LATE)
    group[0].channel.close("it has left")
    assert group[0].channel.arrivals() == []
