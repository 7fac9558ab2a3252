"""Transfers of CPU tensors between ranks of a host, through pipes in its memory: results, and failures."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.page.pipes import PipeEnd
from tests.comm.members import in_threads
from tests.lanes import variants

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.slow_with_ranks(4), pytest.mark.usefixtures("connected")]

# In bytes: less and more than a pipe and a part of it has room for, and several pipes full.
LENGTHS = [0, 1, 5_000, 524_288, 2_096_896, 2_096_897, 2_097_152, 9_000_001]
LARGE = 3_000_000


@pytest.fixture
def connected(session: rw.Session) -> None:
    """The ranks share memory."""
    rw.barrier()
    assert comm_of(None).planes.shared_memory is not None


def data_of(src: int, dst: int, turn: int = 0) -> torch.Tensor:
    """Return what a rank sends to another one."""
    length = LENGTHS[(5 * src + 3 * dst + turn) % len(LENGTHS)]
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(turn + 10 * src + dst)).byte()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("turn", variants(range(len(LENGTHS)), fast={0, 3}))
def test_every_rank_sends_another_length_to_each(session: rw.Session, turn: int) -> None:
    own, ranks = session.rank, range(session.world_size)
    for received, src in zip(rw.all_to_all([data_of(own, dst, turn) for dst in ranks]), ranks, strict=True):
        assert torch.equal(received, data_of(src, own, turn))
    root = turn % session.world_size
    gathered = rw.gather(data_of(own, root, turn), dst=root)
    if gathered is not None:
        assert all(torch.equal(one, data_of(src, root, turn)) for src, one in zip(ranks, gathered, strict=True))
    scattered = rw.scatter([data_of(root, dst, turn) for dst in ranks] if own == root else None, src=root)
    assert torch.equal(scattered, data_of(root, own, turn))


def test_both_directions_at_once_and_no_connections(session: rw.Session) -> None:
    own, others = session.rank, [rank for rank in range(session.world_size) if rank != session.rank]
    rw.all_reduce(1, async_op=True).wait()
    before = descriptors()
    for turn in range(20):
        sent = [rw.send(data_of(own, dst, turn), dst, async_op=True) for dst in others]
        received: dict[int, rw.Work[Any]] = {src: rw.recv(src, async_op=True) for src in others}
        assert all(torch.equal(work.wait(), data_of(src, own, turn)) for src, work in received.items())
        for work in sent:
            work.wait()
    assert descriptors() <= before  # fewer, where what an earlier test has left is collected


def test_groups_of_two_threads_at_the_same_time(session: rw.Session) -> None:
    own, size = session.rank, session.world_size
    groups = [rw.new_group(range(size)) for _ in range(2)]

    def exchange(index: int) -> bool:
        are_equal = True
        for turn in range(index, index + 8):
            received = rw.all_to_all([data_of(own, dst, turn) for dst in range(size)], group=groups[index])
            are_equal &= all(torch.equal(one, data_of(src, own, turn)) for src, one in enumerate(received))
        return are_equal

    assert in_threads(exchange, 2) == [True, True]
    for group in groups:
        group.close()


def test_a_rank_without_memory_is_an_error_on_all(session: rw.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated before the members agree: afterwards, one without it would be killed by the kernel."""

    def no_memory(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no memory here")

    own, size = session.rank, session.world_size
    with rw.new_group(range(size)) as group:
        for length in (5_000, LARGE):
            with monkeypatch.context() as patched:
                if own == 1:
                    patched.setattr(os, "posix_fallocate", no_memory)
                with pytest.raises(rw.CollectiveError if own == 1 else rw.RemoteRankError, match="no memory here"):
                    rw.all_to_all([torch.ones(length)] * size, group=group)
            received = rw.all_to_all([torch.full((length,), float(own))] * size, group=group)
            assert all((one == src).all() for src, one in enumerate(received))


def test_the_memory_of_a_group_is_freed_with_it(session: rw.Session) -> None:
    channel = comm_of(None).control.shared_page
    assert channel is not None

    def blocks() -> int:
        rw.barrier()
        return os.fstat(channel.page._memory.descriptor).st_blocks

    before = blocks()
    for _ in range(2):
        with rw.new_group(range(session.world_size)) as group:
            rw.all_to_all([torch.ones(LARGE)] * session.world_size, group=group)
            assert blocks() > before + 1000
        assert blocks() < before + 200


def test_a_rank_that_is_interrupted_leaves_one_group_and_no_other(
    session: rw.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bytes that it has copied into a pipe, and not counted."""
    own, size = session.rank, session.world_size
    pieces, move = [torch.full((LARGE,), float(own))] * size, PipeEnd.move
    is_copied = iter([False, True])
    group, other = rw.new_group(range(size)), rw.new_group(range(size))

    def fence() -> None:
        if next(is_copied):
            signal.raise_signal(signal.SIGINT)

    def interrupted(end: PipeEnd) -> int:
        if end._sends and end._moved:  # its second part, for which there is room; no rank has all of its data then
            end._fence = fence
        return move(end)

    with monkeypatch.context() as patched:
        if own == 1:
            patched.setattr(PipeEnd, "move", interrupted)
        with pytest.raises((KeyboardInterrupt, rw.CollectiveError)) as raised:
            rw.all_to_all(pieces, group=group)
    assert raised.type is KeyboardInterrupt if own == 1 else "rank " in str(raised.value)
    if own == 0:
        assert "rank 1 all_to_all at test_transfers.py" in str(raised.value), raised.value
        assert "was ended by KeyboardInterrupt" in str(raised.value)
    with pytest.raises(rw.CollectiveError, match="cannot be used any more"):
        rw.all_to_all(pieces, group=group)
    assert all((one == src).all() for src, one in enumerate(rw.all_to_all(pieces, group=other)))
    other.close()
