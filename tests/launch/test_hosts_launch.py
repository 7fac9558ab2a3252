"""What a terminal decides about its hosts: the store in which they meet, and which of them are lost."""

from __future__ import annotations

import pytest

from rankwise._launch.forkserver.ipc import pop_messages, serialize, whole_messages
from rankwise._launch.hosts.rounds import StoreValues
from rankwise._launch.other_hosts.watchdog import Heartbeats


def test_the_store_does_what_torchs_does_but_does_not_wait() -> None:
    store = StoreValues()
    assert not store.apply("check", ["a", "b"])
    store.apply("set", "a", b"1")
    assert store.apply("check", ["a"])
    assert not store.apply("check", ["a", "b"])
    assert store.apply("get", "a") == b"1"
    assert [store.apply("add", "a", amount) for amount in (2, -1)] == [3, 2]
    assert store.apply("add", "new", 5) == 5
    assert store.apply("get", "new") == b"5"


@pytest.mark.parametrize(
    ("seconds", "failed", "silence", "is_lost"),
    [(300.0, False, 299.0, False), (10.0, False, 10.4, False), (10.0, False, 11.0, True), (300.0, True, 3.5, True)],
)
def test_a_host_is_lost_after_the_timeout_of_its_ranks_or_soon_after_a_failure(
    seconds: float, failed: bool, silence: float, is_lost: bool
) -> None:
    beats = Heartbeats(now=100.0)
    beats.seconds, beats.has_failed = seconds, failed
    beats.note(7, now=100.0)
    for now in range(101, int(100 + silence) + 1):  # it looks all the time, and has heard of another one
        beats.note(8, now=now)
        beats.silent(now)
    assert beats.silent(100 + silence) == ({7: silence} if is_lost else {})
    beats.forget(7)
    assert not beats.silent(100 + silence)


def test_who_was_stopped_itself_has_lost_nobody() -> None:
    beats = Heartbeats(now=0.0)
    beats.seconds = 10.0
    beats.note(7, now=1.0)
    assert not beats.silent(500.0)
    assert not beats.silent(501.0)
    for now in range(502, 511):
        assert not beats.silent(now)
    assert beats.silent(511.0) == {7: 11.0}


def test_a_watchdog_hands_on_whole_messages_alone() -> None:
    sent = serialize("one") + serialize(["two"])
    for size in range(len(sent) + 1):
        received = bytearray(sent[:size])
        whole = whole_messages(received)
        assert (
            pop_messages(received[:whole])
            == ["one", ["two"]][: (whole >= len(serialize("one"))) + (whole == len(sent))]
        )
        assert whole in {0, len(serialize("one")), len(sent)}
