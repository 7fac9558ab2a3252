"""The exchange of frames and data over the mesh: members are threads of this process, on one host or on several."""

from __future__ import annotations

import functools
import os
import random
import socket

import pytest
from rankwise._comm.control.mesh import Mesh

import rankwise as rw
from rankwise._comm.control.protocol import Frame, FrameKind
from tests.comm.members import CALL, NO_BODIES, SIZE, assert_connected, exchange, in_threads

FAILED = Frame(FrameKind.FAILED, 0, CALL.call, body=bytes(800))


def exchange_one(meshes: list[Mesh], bodies: list[list[bytes]], group_rank: int) -> dict[int, Frame]:
    return exchange(meshes[group_rank], bodies[group_rank])


def host_suffix(meshes: list[Mesh]) -> str:
    """Return the host of a rank as messages show it: nothing where all ranks are on one host."""
    return "" if meshes[0].same_host else f" on {socket.gethostname()}"


def buffered_bytes(meshes: list[Mesh]) -> int:
    """Return the size of all buffers of the members, with 1,000 bytes for each stored frame."""
    peers = [peer for mesh in meshes for peer in mesh._peers.values()]
    return sum(len(peer.outbox) + len(peer.inbox) + 1000 * len(peer.frames) for peer in peers)


def test_each_member_receives_its_own_body(meshes: list[Mesh]) -> None:
    """Also in frames that are larger than the buffers of a connection."""
    for length in (1, 3_000_000):
        bodies = [[bytes([src, dst]) * length for dst in range(SIZE)] for src in range(SIZE)]
        received = in_threads(functools.partial(exchange_one, meshes, bodies))
        for dst, frames in enumerate(received):
            for src in range(SIZE):
                assert frames[src].body == bytes([src, dst]) * length
                assert frames[src].call == CALL.call


@pytest.mark.soak(50)
def test_frames_and_data_alternate(meshes: list[Mesh], seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - a test
    sizes = [[generator.choice([1, 17, 40_000, 2_000_000]) for _ in range(SIZE)] for _ in range(SIZE)]

    def transfer(group_rank: int) -> list[bool]:
        correct = []
        others = [other for other in range(SIZE) if other != group_rank]
        for step in range(5):
            exchange(meshes[group_rank], NO_BODIES)
            buffers = {src: bytearray(sizes[src][group_rank]) for src in others}
            meshes[group_rank].transfer(
                {dst: memoryview(bytes([group_rank + step]) * sizes[group_rank][dst]) for dst in others},
                {src: memoryview(buffer) for src, buffer in buffers.items()},
                timeout=100.0,
            )
            correct += [buffer == bytes([src + step]) * len(buffer) for src, buffer in buffers.items()]
        return correct

    assert in_threads(transfer) == [[True] * 10] * SIZE


def test_the_reason_of_a_member_that_left_is_in_the_error(meshes: list[Mesh]) -> None:
    assert_connected(meshes)
    meshes[1].close("left with ValueError: no data (train.py:12)")
    errors = in_threads(lambda group_rank: exchange(meshes[group_rank], NO_BODIES) if group_rank != 1 else None)
    for error in (errors[0], errors[2]):
        assert isinstance(error, rw.CollectiveError)
        assert f"rank 11{host_suffix(meshes)} left with ValueError: no data (train.py:12)" in str(error)
        assert "last seen in all_reduce at train.py:88" in str(error)


def test_a_member_that_leaves_in_the_middle_of_its_data_is_gone(meshes: list[Mesh]) -> None:
    data = bytes(20_000_000)

    def transfer(group_rank: int) -> None:
        exchange(meshes[group_rank], NO_BODIES)
        if group_rank == 0:
            meshes[0].transfer({1: memoryview(data)}, {}, timeout=100.0)
        elif group_rank == 1:
            buffer = bytearray(len(data))
            meshes[1]._peers[0].receive()
            meshes[0].close("left in the middle")
            meshes[1].transfer({}, {0: memoryview(buffer)}, timeout=100.0)

    results = in_threads(transfer)
    assert isinstance(results[1], rw.CollectiveError), results
    assert "rank 10" in str(results[1])


def test_a_timeout_is_raised_on_every_member(meshes: list[Mesh]) -> None:
    """Also on a member that is late for the exchange. The next exchange works."""
    early = in_threads(lambda group_rank: exchange(meshes[group_rank], NO_BODIES, timeout=0.2) if group_rank else None)
    late = in_threads(lambda group_rank: None if group_rank else exchange(meshes[group_rank], NO_BODIES))[0]
    for error in (*early[1:], late):
        assert isinstance(error, rw.CollectiveTimeoutError)
        assert f"Missing: rank 10{host_suffix(meshes)}, not seen in any collective here" in str(error)
    assert_connected(meshes)


def test_a_failure_ends_an_exchange_without_waiting_for_the_rest(meshes: list[Mesh]) -> None:
    meshes[2].post_frame(Frame(FrameKind.FAILED, 0, CALL.call, body=b"why"), timeout=100.0)
    frames = in_threads(lambda group_rank: exchange(meshes[0], NO_BODIES) if group_rank == 0 else None)[0]
    assert frames[2].body == b"why"
    assert 1 not in frames


def test_members_that_fail_in_every_call_store_no_old_frames(meshes: list[Mesh]) -> None:
    for _ in range(3000):
        for mesh in meshes:
            mesh.post_frame(FAILED, timeout=100.0)
    assert buffered_bytes(meshes) < 50_000
    assert_connected(meshes)


def test_a_member_that_fails_repeatedly_waits_for_members_that_read_nothing(meshes: list[Mesh]) -> None:
    with pytest.raises(rw.CollectiveTimeoutError, match=r"ranks? 1.* read nothing for 0\.2 s"):
        for _ in range(100_000):
            meshes[0].post_frame(FAILED, timeout=0.2)
    posted = meshes[0].sequence
    assert buffered_bytes(meshes) < 2_500_000

    def catch_up(group_rank: int) -> int:
        for _ in range(posted):
            if group_rank:
                meshes[group_rank].post_frame(FAILED, timeout=100.0)
        return len(exchange(meshes[group_rank], NO_BODIES))

    assert in_threads(catch_up) == [SIZE] * SIZE


def test_a_forked_child_does_not_keep_connections_open(meshes: list[Mesh]) -> None:
    """The worker of a data loader inherits them, and would hide the death of its rank."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)  # live on
        os._exit(0)
    meshes[2].abandon()
    errors = in_threads(lambda group_rank: exchange(meshes[group_rank], NO_BODIES) if group_rank < 2 else None)[:2]
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    for error in errors:
        assert isinstance(error, rw.CollectiveError)
        assert f"rank 12{host_suffix(meshes)} is gone: its connection closed" in str(error)
