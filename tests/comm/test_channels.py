"""Exchanges and data of a group: members are threads of this process, on one host or on several."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.control import branch, channel
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.protocol import Description
from rankwise._comm.control.verdict import Outcome
from tests.comm.conftest import ROUTES
from tests.comm.members import SIZE, Member, agree, assert_connected, failed, in_threads, open_group
from tests.lanes import variants


def host_suffix(group: list[Member]) -> str:
    """Return the host of a rank as messages show it: nothing where all ranks are on one host."""
    return "" if group[0].links.same_host else f" on {socket.gethostname()}"


def stored_bytes(group: list[Member]) -> int:
    """Return the size of all frames that the members have stored or not sent, with 1,000 bytes for each stored one."""
    if group[0].links.page is not None:
        return 0
    peers = [peer for member in group for peer in member.links._peers.values()]
    inboxes = [peer.inbox(0) for peer in peers]
    num_stored = sum(len(inbox.calls) + len(inbox.verdicts) + len(inbox.ends) for inbox in inboxes)
    return sum(peer.num_unsent + len(peer._received) for peer in peers) + 1000 * num_stored


def test_each_member_receives_every_body(group: list[Member]) -> None:
    """Also in frames that are larger than a slot, or than the buffers of a connection."""
    for length in (1, 8000, 8192, 3_000_000, 1):
        bodies = [bytes([member]) * length for member in range(SIZE)]
        received = in_threads(lambda member: agree(group[member], bodies[member], read=range(SIZE)))  # noqa: B023
        for verdict in received:
            assert verdict.bodies == dict(enumerate(bodies))


def test_a_result_is_computed_from_all_bodies(group: list[Member]) -> None:
    def exchange(member: int) -> bytes:
        call = Description("all_reduce", site="train.py:88")
        channel = group[member].channel
        return channel.agree(call, b"%d" % member, combine=b"".join, timeout=100.0, on_pause=lambda _: None).result

    assert in_threads(exchange) == [b"012"] * SIZE


@pytest.mark.soak(50)
def test_frames_and_data_alternate(group: list[Member], seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - a test
    sizes = [[generator.choice([1, 17, 40_000, 2_000_000]) for _ in range(SIZE)] for _ in range(SIZE)]

    def transfer(group_rank: int) -> list[bool]:
        correct = []
        others = [other for other in range(SIZE) if other != group_rank]
        for step in range(5):
            agree(group[group_rank])
            buffers = {src: torch.zeros(sizes[src][group_rank], dtype=torch.uint8) for src in others}
            data = {dst: torch.full((sizes[group_rank][dst],), group_rank + step + 1).byte() for dst in others}
            group[group_rank].channel.transfer(data, buffers, timeout=100.0)()
            correct += [bool((buffer == src + step + 1).all()) for src, buffer in buffers.items()]
        return correct

    assert in_threads(transfer) == [[True] * 10] * SIZE


@pytest.mark.parametrize("route", ["sockets"], indirect=True)
def test_threads_of_two_groups_agree_on_what_a_connection_waits_for(
    group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread begins to wait until it can send, while another one has sent all."""
    links, entered = group[0].links, threading.Event()
    peer, register = links.peer(11), links.loop.register

    def register_late(*arguments: Any) -> None:
        if arguments[-1] is not None:
            entered.set()
            time.sleep(0.1)  # so that the other thread is here as well, unless it waits for this one
        register(*arguments)

    monkeypatch.setattr(links.loop, "register", register_late)
    peer._outbox += b"x"

    def update(thread: int) -> None:
        if thread:
            assert entered.wait(100)
            peer._outbox.clear()
        links.update_interest(peer)

    assert in_threads(update, 2) == [None, None]
    assert peer.connection is not None
    assert links.loop._callbacks[peer.connection.fileno()][1] is None
    assert_connected(group)


def test_a_frame_that_another_thread_reads_ends_the_wait_for_it(
    links: list[Links], group: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that receives data of one group may read a frame of another group, in which a second thread waits."""
    monkeypatch.setattr(channel, "_FIRST_SLICE_SECONDS", 10.0)
    monkeypatch.setattr(channel, "SLICE_SECONDS", 10.0)
    monkeypatch.setattr(branch, "_LOOK_SECONDS", 10.0)
    other = open_group(links, 1)
    assert_connected(group)
    pauses: list[object] = []
    sent = threading.Event()
    data, buffer = torch.full((1000,), 7, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)

    def run(thread: int) -> None:
        own = thread % SIZE
        if thread == SIZE:
            assert sent.wait(100)
            time.sleep(0.1)  # for the frame that follows the data
            group[0].channel.transfer({}, {1: buffer}, timeout=100.0)()
            return
        if own == 1:
            group[1].channel.transfer({0: data}, {}, timeout=100.0)()
            sent.set()
        call = Description("all_reduce", site="train.py:88")
        assert other[own].channel.agree(call, b"", timeout=100.0, on_pause=pauses.append).error is None

    results = in_threads(run, SIZE + 1)
    for member in other:
        member.channel.close("closed the group")
    assert results == [None] * (SIZE + 1)
    assert torch.equal(buffer, data)
    assert pauses == []


def test_the_reason_of_a_member_that_left_is_in_the_error(group: list[Member]) -> None:
    assert_connected(group)
    group[1].leave("left with ValueError: no data (train.py:12)")
    errors = in_threads(lambda group_rank: agree(group[group_rank]) if group_rank != 1 else None)
    for error in (errors[0], errors[2]):
        assert isinstance(error, rw.CollectiveError)
        assert f"rank 11{host_suffix(group)} left with ValueError: no data (train.py:12)" in str(error)
        assert "last seen in all_reduce at train.py:88" in str(error)


def test_a_member_that_leaves_in_the_middle_of_its_data_is_gone(group: list[Member]) -> None:
    data = torch.zeros(20_000_000, dtype=torch.uint8)

    def transfer(group_rank: int) -> None:
        agree(group[group_rank])
        if group_rank == 0:
            group[0].channel.transfer({1: data}, {}, timeout=100.0)()
        elif group_rank == 1:
            run = group[1].channel.transfer({}, {0: torch.empty_like(data)}, timeout=100.0)
            group[0].leave("left in the middle")
            run()

    results = in_threads(transfer)
    assert isinstance(results[1], rw.CollectiveError), results
    assert "rank 10" in str(results[1])


def test_a_timeout_is_raised_on_every_member(group: list[Member]) -> None:
    """Also on a member that is late for the exchange. The next exchange works."""
    for late in range(SIZE):
        early = in_threads(lambda member: agree(group[member], timeout=0.2) if member != late else None)  # noqa: B023
        errors = [*early[:late], in_threads(lambda _: agree(group[late]), 1)[0], *early[late + 1 :]]  # noqa: B023
        for error in errors:
            assert isinstance(error, rw.CollectiveTimeoutError)
            assert f"Missing: rank 1{late}{host_suffix(group)}, " in str(error)
        assert_connected(group)


def test_a_failure_ends_an_exchange_without_waiting_for_the_rest(group: list[Member]) -> None:
    """Whoever fails, and whoever waits; the one that comes last raises too, and the next exchange works."""
    for odd in range(SIZE):
        with group[odd].channel.held():
            group[odd].channel.post(failed(group[odd]), timeout=100.0)
        first, last = (member for member in range(SIZE) if member != odd)
        for member in (last, first):
            errors = in_threads(lambda _: agree(group[member]), 1)  # noqa: B023
            assert isinstance(errors[0], rw.RemoteRankError), errors
            assert errors[0].rank == 10 + odd
        assert_connected(group)


def test_a_failure_that_fills_a_connection_is_sent_to_the_end(group: list[Member]) -> None:
    """Though the thread that has failed does nothing with the group any more."""

    def run(member: int) -> None:
        if member:
            agree(group[member], timeout=20.0)
        while group[1].channel.sequence == 0 or group[2].channel.sequence == 0:
            time.sleep(0.001)
        with group[0].channel.held():
            group[0].channel.post(failed(group[0], traceback="x" * 3_000_000), timeout=100.0)

    for error in in_threads(run)[1:]:
        assert isinstance(error, rw.RemoteRankError), error


@pytest.mark.parametrize("route", variants(ROUTES, fast={"page", "sockets"}, slow={"led sockets"}), indirect=True)
def test_members_that_fail_in_every_call_store_no_old_frames(group: list[Member]) -> None:
    for _ in range(3000):
        for member in group:
            with member.channel.held():
                member.channel.post(failed(member), timeout=100.0)
    assert stored_bytes(group) < 50_000
    assert_connected(group)


@pytest.mark.parametrize(
    "route", variants(["page", "sockets", "several hosts"], slow={"page", "sockets"}), indirect=True
)
def test_a_member_that_fails_repeatedly_waits_for_members_that_read_nothing(group: list[Member]) -> None:
    for member in (0, 1):
        with pytest.raises(rw.CollectiveTimeoutError, match=r"ranks? 1.* read nothing for 0\.2 s"):  # noqa: SIM117
            with group[member].channel.held():
                for _ in range(100_000):
                    group[member].channel.post(failed(group[member]), timeout=0.2)
        posted = group[member].channel.sequence

        def catch_up(group_rank: int) -> Outcome:
            for _ in range(posted - group[group_rank].channel.sequence):  # noqa: B023
                with group[group_rank].channel.held():
                    group[group_rank].channel.post(failed(group[group_rank]), timeout=100.0)
            return agree(group[group_rank]).outcome

        assert in_threads(catch_up) == [Outcome.AGREED] * SIZE


def test_a_forked_child_does_not_keep_connections_open(group: list[Member]) -> None:
    """The worker of a data loader inherits them, and would hide the death of its rank."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)  # live on
        os._exit(0)
    for peer in group[2].links._peers.values():
        assert peer.connection is not None
        peer.connection.close()
    if group[0].links.page is not None:
        group[2].channel.close("left")
    errors = in_threads(lambda group_rank: agree(group[group_rank]) if group_rank < 2 else None)[:2]
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    for error in errors:
        assert isinstance(error, rw.CollectiveError)
        assert f"rank 12{host_suffix(group)}" in str(error)


def test_closing_in_another_thread_ends_an_exchange(group: list[Member]) -> None:
    def run(member: int) -> None:
        if member:
            agree(group[member])
        while group[1].channel.sequence == 0:
            time.sleep(0.001)
        group[1].leave("closed in another thread")

    _, error = in_threads(run, 2)
    assert isinstance(error, rw.CollectiveError)
    assert "this rank has left the group, in another thread" in str(error)


def test_a_call_that_begins_after_the_channel_was_closed_raises(group: list[Member]) -> None:
    """Another thread has closed it after this one had found it."""
    group[1].channel.close("closed in another thread")
    data = torch.zeros(8, dtype=torch.uint8)

    def use(number: int) -> None:
        if number == 0:
            agree(group[1])
        else:
            group[1].channel.transfer({0: data}, {}, timeout=20.0)()

    for error in in_threads(use, 2):
        assert isinstance(error, rw.CollectiveError), error
        assert "this rank has left the group, in another thread" in str(error)
    assert list(group[1].links.channels) == []
    group[1].channel.close("again")
