"""Waiting for descriptors: once for several, and in an event loop."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from rankwise._net.polling import READABLE, WRITABLE, EventLoop, poll, wait_readable


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_poll_returns_the_events_that_were_asked_for(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert poll({ours.fileno(): READABLE}, 0) == []
    theirs.send(b"x")
    assert poll({ours.fileno(): READABLE | WRITABLE, theirs.fileno(): READABLE}) == [
        (ours.fileno(), READABLE | WRITABLE)
    ]


def test_a_closed_connection_is_readable(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert wait_readable({"ours": ours}, 0) == []
    theirs.close()
    assert wait_readable({"ours": ours}) == ["ours"]


def test_an_event_loop_calls_the_functions_of_ready_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    loop, calls = EventLoop(), []
    loop.register(ours, lambda: calls.append(ours.recv(1)), lambda: calls.append(b"writable"))
    assert loop.run_once(10)
    assert calls == [b"writable"]
    loop.register(ours, lambda: calls.append(ours.recv(1)))
    assert not loop.run_once(0)
    theirs.send(b"ab")
    assert loop.run_until(lambda: calls[-1] == b"b", time.monotonic() + 10)
    assert calls == [b"writable", b"a", b"b"]
    loop.unregister(ours)
    theirs.send(b"c")
    assert not loop.run_once(0)
    loop.close()


def test_an_event_loop_runs_until_a_deadline_that_may_move(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    loop, deadlines = EventLoop(), [time.monotonic() + 50]
    loop.register(ours, lambda: deadlines.append(0.0))
    theirs.send(b"x")
    assert not loop.run_until(lambda: False, lambda: deadlines[-1])
    assert loop.run_until(lambda: True, 0.0), "a condition that holds needs no time"
    loop.close()
