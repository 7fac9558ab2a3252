"""The pipes between members of a host, through which data moves. Members are threads."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import rankwise as rw
from rankwise._comm.control import channel
from rankwise._comm.control.page import layout, pipes
from rankwise._comm.control.page.layout import PIPE_HEADER_BYTES
from rankwise._comm.control.page.pipes import Pipes
from rankwise._comm.control.page_channel import PageChannel
from tests.comm.members import SIZE, Member, agree, in_threads

pytestmark = pytest.mark.parametrize("route", ["page"], indirect=True)

CAPACITY = 8192 - PIPE_HEADER_BYTES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes of 8 KiB, of which an end copies at most 3,000 bytes at once."""
    monkeypatch.setattr(layout, "_MAX_PIPE_BYTES", 8192)
    monkeypatch.setattr(pipes, "_CHUNK_BYTES", 3000)


@pytest.fixture
def asleep(group: list[Member], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Members that wait sleep at once, and so long that a lost wake-up is noticed."""
    monkeypatch.setattr(channel, "SLICE_SECONDS", 20.0)
    for member in group:
        page_of(member).page.spin_seconds = 0.0
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 15


def page_of(member: Member) -> PageChannel:
    assert isinstance(member.channel, PageChannel)
    return member.channel


def data_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).byte()


def prepared(
    member: Member, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]
) -> Callable[[], None]:
    return member.channel.transfer(outgoing, incoming, timeout=100.0)


@pytest.mark.usefixtures("small", "asleep")
def test_members_that_sleep_are_woken_for_each_part(group: list[Member]) -> None:
    """Data of different lengths, most of them longer than a pipe, both ways at once."""
    lengths = [1, 2999, 3000, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 17, 100_003]

    def sent(turn: int, src: int, dst: int) -> torch.Tensor:
        return data_of(lengths[(turn + 3 * src + dst) % len(lengths)], turn + src)

    def run(own: int) -> bool:
        others, same = [other for other in range(SIZE) if other != own], True
        for turn in range(3 * len(lengths)):
            agree(group[own])
            wanted = {src: sent(turn, src, own) for src in others}
            received = {src: torch.zeros_like(data) for src, data in wanted.items()}
            prepared(group[own], {dst: sent(turn, own, dst) for dst in others}, received)()
            same &= all(torch.equal(received[src], wanted[src]) for src in others)
        return same

    assert in_threads(run) == [True] * SIZE


@pytest.mark.usefixtures("asleep")
def test_data_that_comes_just_before_a_member_sleeps_ends_its_wait(
    group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender does not wake it: it does not sleep yet."""
    sent, received, wait = data_of(1000, 1), torch.zeros(1000, dtype=torch.uint8), Pipes.wait
    senders = [prepared(group[0], {1: sent}, {})]

    def wait_late(move: Pipes, seconds: float) -> None:
        senders.pop()()
        wait(move, seconds)

    monkeypatch.setattr(Pipes, "wait", wait_late)
    prepared(group[1], {}, {0: received})()
    assert torch.equal(received, sent)


@pytest.mark.usefixtures("small", "asleep")
def test_transfers_without_an_agreement_between_them_follow_each_other(group: list[Member]) -> None:
    """As those of one call: the sender is done with the next ones before the receiver is with the first."""
    sent = [data_of(length, length) for length in (5, 9000, 1, 1, CAPACITY, 7, 20_000, 3)]
    received = [torch.zeros_like(each) for each in sent]

    def run(own: int) -> None:
        moves = [
            prepared(group[own], *(({1: out}, {}) if own == 0 else ({}, {0: into})))
            for out, into in zip(sent, received, strict=True)
        ]
        for number, move in enumerate(moves):
            if own == 1 and number % 3 == 0:
                time.sleep(0.01)
            move()

    assert in_threads(run, 2) == [None] * 2
    assert all(map(torch.equal, sent, received))


def test_bytes_are_counted_and_copied_on_the_right_side_of_a_fence(
    group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can wait for a processor to reorder memory, so this looks at what is done when a fence is passed."""
    sent, received = data_of(8, 1), torch.zeros(8, dtype=torch.uint8)
    prepared(group[0], {1: sent}, {})
    prepared(group[1], {}, {0: received})
    writer, reader = page_of(group[0])._pipes._ends[0, 1], page_of(group[1])._pipes._ends[0, 1]  # type: ignore[union-attr]
    steps: list[tuple[bool, int, bool, int]] = []
    memory = (ctypes.c_char * 8).from_address(writer._buffer)

    def look() -> None:
        steps.append((any(memory.raw), writer._own[0], bool(received.any()), reader._own[0]))

    for end, data in ((writer, sent), (reader, received)):
        monkeypatch.setattr(end, "_fence", look)
        end.begin(data)
        assert end.move() == 8
    assert steps == [(False, 0, False, 0), (True, 0, False, 0), (True, 8, False, 0), (True, 8, True, 0)]
    assert (writer._own[0], reader._own[0]) == (8, 8)
    assert torch.equal(sent, received)


def test_short_transfers_take_little_memory_which_is_allocated_before(group: list[Member]) -> None:
    descriptor = page_of(group[0]).page._memory.descriptor

    def move(own: int, length: int) -> Callable[[], None]:
        data = torch.ones(length, dtype=torch.uint8)
        return prepared(group[own], {1: data} if own == 0 else {}, {0: data} if own == 1 else {})

    def run(own: int) -> None:
        for _ in range(300):
            agree(group[own])
            move(own, 10_000)()

    for _ in range(2):  # which take memory for their frames
        assert in_threads(lambda own: agree(group[own]).error) == [None] * SIZE
    runs = [move(0, 10_000), move(1, 10_000)]
    before = os.fstat(descriptor).st_blocks
    for each in runs:
        each()
    assert os.fstat(descriptor).st_blocks == before
    assert in_threads(run) == [None] * SIZE
    assert os.fstat(descriptor).st_blocks == before
    move(0, 1 << 27)
    assert os.fstat(descriptor).st_blocks - before < (3 << 20) // 512


def test_a_member_that_leaves_in_another_thread_ends_its_transfer(group: list[Member]) -> None:
    """And that of the member at the other end."""
    waits = threading.Event()

    def run(own: int) -> None:
        if own == 2:
            assert waits.wait(100)
            group[0].channel.close("left the group")
            return
        data = torch.ones(50_000_000, dtype=torch.uint8)
        move = prepared(group[own], *(({2: data}, {}) if own == 0 else ({}, {0: data})))
        waits.set()
        move()

    errors = in_threads(run)
    assert isinstance(errors[0], rw.CollectiveError)
    assert "this rank has left the group, in another thread" in str(errors[0])
    assert str(errors[1]) == f"{group[1].channel.call} failed: rank 10 left the group"


def test_a_transfer_without_progress_times_out(group: list[Member]) -> None:
    with pytest.raises(rw.CollectiveTimeoutError, match=r": no data from or to rank 11, rank 12 for 0.2 s$"):
        group[0].channel.transfer(
            {1: torch.ones(50_000_000, dtype=torch.uint8)}, {2: torch.ones(1, dtype=torch.uint8)}, timeout=0.2
        )()
