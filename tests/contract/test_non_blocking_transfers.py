"""`send` and `recv` with `async_op=True`: each direction between two ranks has an order of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usefixtures("no_thread_stays")]

HERE = r"test_non_blocking_transfers\.py:\d+"
LARGE = 200_000


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return bool(found == wanted)


def value_of(src: int, dst: int, number: int) -> Any:
    """Return a small object, a small tensor or a large one, which differs from all others."""
    mark = src * 100 + dst * 10 + number
    return [("value", mark), torch.full((3, 2), mark), torch.full((LARGE + number,), float(mark))][number % 3]


def test_all_ranks_send_and_receive_at_once_in_both_directions(comm: Group) -> None:
    rank = rw.get_rank()
    others = [other for other in range(comm.size) if other != rank]
    sent = [rw.send(value_of(rank, dst, number), dst, async_op=True) for number in range(6) for dst in others]
    received = [(src, number, rw.recv(src, async_op=True)) for src in others for number in range(6)]
    for src, number, work in reversed(received):
        assert isinstance(work, rw.Work)
        assert same(work.wait(), value_of(src, rank, number))
        assert work.done()
        assert work.wait() is work.wait()
    assert [work.wait() for work in sent] == [None] * len(sent)
    assert rw.all_reduce(1) == comm.size


def test_tensors_are_received_on_the_device_of_a_blocking_call(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    value = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.ones(LARGE)]
    received: list[tuple[Any, Any]] = []
    if rank == 0:
        for work in [rw.send(value, dst, async_op=True) for dst in range(1, size) for _ in range(2)]:
            work.wait()
    else:
        pending: rw.Work[Any] = rw.recv(0, async_op=True)
        received.append((rw.recv(0), pending.wait()))
    source: Any = value if rank == 0 else None
    received.append((rw.broadcast(source), rw.broadcast(source, async_op=True).wait()))
    sources = [value] * size if rank == 0 else None
    received.append((rw.scatter(sources), rw.scatter(sources, async_op=True).wait()))
    received.append((rw.all_gather(source)[0], rw.all_gather(source, async_op=True).wait()[0]))
    for blocking, other in received:
        for one, same_one in zip(blocking, other, strict=True):
            assert (one.device, type(one), one.requires_grad) == (
                *(same_one.device, type(same_one), same_one.requires_grad),
            )
            assert torch.equal(one, same_one)


def test_in_a_ring_every_rank_may_send_before_it_receives(comm: Group) -> None:
    rank = rw.get_rank()
    value = torch.full((LARGE,), rank)
    for _ in range(3):
        sent = rw.send(value, (rank + 1) % comm.size, async_op=True)
        value = rw.recv((rank - 1) % comm.size)
        sent.wait()
    assert same(value, torch.full((LARGE,), (rank - 3) % comm.size))


@pytest.mark.ranks(3)
def test_a_pending_call_does_not_wait_for_one_with_another_rank(comm: Group) -> None:
    """Rank 1 receives only after rank 2, which was sent to later, has its value."""
    if comm.rank == 0:
        works = [rw.send(f"for rank {dst}", dst, async_op=True) for dst in (1, 2)]
        works += [rw.recv(src, async_op=True) for src in (1, 2)]
        assert [work.wait() for work in works[::-1]] == ["from 2", "from 1", None, None]
    elif comm.rank == 1:
        assert rw.recv(2) == "go on"
        assert rw.recv(0) == "for rank 1"
        rw.send("from 1", 0)
    else:
        assert rw.recv(0) == "for rank 2"
        rw.send("go on", 1)
        rw.send("from 2", 0)


def test_collectives_and_both_directions_are_pending_together(comm: Group) -> None:
    """No call waits for those of another kind, in whatever order each rank makes them."""
    group = rw.new_group(range(comm.size))
    rank, other = rw.get_rank(), rw.get_rank() ^ 1
    if other >= comm.size:
        other = -1
    transfers: list[Callable[[], rw.Work[Any]]] = [
        lambda: rw.send(value_of(rank, other, 2), other, async_op=True),
        lambda: rw.recv(other, async_op=True),
        lambda: rw.send(value_of(rank, other, 0), rw.GroupRank(other), group=group, async_op=True),
        lambda: rw.recv(other, group=group, async_op=True),
    ]
    works: dict[int, rw.Work[Any]] = {}
    order = [] if other < 0 else [0, 2, 1, 3] if rank % 2 else [3, 1, 2, 0]
    totals = [rw.all_reduce(torch.ones(LARGE), async_op=True)]
    for index in order:
        works[index] = transfers[index]()
        totals.append(rw.all_reduce(torch.ones(LARGE), async_op=True))
    totals += [rw.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(4 - len(order))]
    for index in order[::-1]:
        found = works[index].wait()
        assert same(found, [None, value_of(other, rank, 2), None, value_of(other, rank, 0)][index])
    assert [work.wait().sum() for work in totals] == [LARGE * comm.size] * 5
    assert rw.all_reduce(1, group=group) == comm.size


@pytest.mark.ranks(2)
def test_a_blocking_call_comes_after_the_pending_ones_of_its_direction(comm: Group) -> None:
    assert comm.size == 2
    for sender in range(2):
        if rw.get_rank() == sender:
            for number in range(20):
                rw.send(number, 1 - sender, async_op=True).done()
            rw.send(20, 1 - sender)
        else:
            works = [rw.recv(sender, async_op=True) for _ in range(10)]
            rest = [rw.recv(sender) for _ in range(11)]
            assert all(work.done() for work in works)
            assert [work.wait() for work in works] + rest == list(range(21))


@pytest.mark.ranks(2)
def test_a_pending_call_is_named(comm: Group) -> None:
    if comm.rank == 0:
        work = rw.recv(1, async_op=True)
        assert re.fullmatch(rf"<Work recv at {HERE}, pending>", repr(work))
        with pytest.raises(rw.CollectiveTimeoutError, match=rf"recv at {HERE} has not ended within 0.05 s"):
            work.wait(timeout=0.05)
        rw.send("go", 1)
        assert work.wait() == "value"
        assert re.fullmatch(rf"<Work recv at {HERE}, done>", repr(work))
    else:
        assert rw.recv(0) == "go"
        rw.send("value", 0)


@pytest.mark.ranks(2)
def test_an_error_of_one_is_raised_by_wait_on_both(comm: Group) -> None:
    for sender in range(2):
        if rw.get_rank() == sender:
            wrong = rw.send(threading.Lock(), 1 - sender, async_op=True)
            right = rw.send("next", 1 - sender, async_op=True)
            right.wait()
            with pytest.raises(rw.PayloadTypeError, match="lock") as raised:
                wrong.wait()
            assert len(raised.traceback) == 2, "the line of the program, and `wait`"
            for note in raised.value.__notes__:
                assert re.fullmatch(rf"Raised by send at {HERE}, which was started with async_op=True.", note)
        else:
            works = [rw.recv(sender, async_op=True) for _ in range(2)]
            assert works[1].wait() == "next"
            with pytest.raises(rw.RemoteRankError, match="lock"):
                works[0].wait()
    assert rw.all_reduce(1) == comm.size


class NotUnpickled:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


@pytest.mark.ranks(2)
def test_a_value_that_cannot_be_unpickled_is_an_error_of_the_receiver_alone(comm: Group) -> None:
    if comm.rank == 0:
        for value in (NotUnpickled(), "next"):
            rw.send(value, 1, async_op=True).wait()
    else:
        works = [rw.recv(0, async_op=True) for _ in range(2)]
        with pytest.raises(rw.PayloadTypeError, match="cannot be unpickled"):
            works[0].wait()
        assert works[1].wait() == "next"


def test_wrong_arguments_are_refused_at_once(comm: Group) -> None:
    others: list[Any] = [rw.get_rank(), 99, -1, "1", None, rw.GroupRank(99)]
    for other in others:
        with pytest.raises(rw.InvalidArgumentError):
            rw.send(1, other, async_op=True)
        with pytest.raises(rw.InvalidArgumentError):
            rw.recv(other, async_op=True)
    if comm.rank == 0:
        with pytest.raises(rw.InvalidArgumentError, match="async_op='yes'"):
            rw.send(1, 1, async_op="yes")  # type: ignore[call-overload]
    elif comm.rank == 1:
        with pytest.raises(rw.RemoteRankError, match="async_op='yes'"):
            rw.recv(0, async_op=True).wait()
    assert rw.all_reduce(1) == comm.size


def test_in_a_section_for_one_rank_a_call_is_refused_at_once(comm: Group) -> None:
    with rw.one_rank_only() as mine:
        if mine:
            with pytest.raises(
                rw.CollectiveError, match=rf"recv at {HERE} cannot begin inside of the block of one_rank"
            ):
                rw.recv(1, async_op=True)
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks("serial", 1)
def test_alone_there_is_nobody_to_send_to(comm: Group) -> None:
    for call in (lambda: rw.send(1, dst=0, async_op=True), lambda: rw.recv(src=0, async_op=True)):
        with pytest.raises(rw.InvalidArgumentError, match="itself"):
            call()
    assert rw.all_reduce(1) == comm.size


def test_closing_a_group_waits_for_its_transfers(comm: Group, caplog: pytest.LogCaptureFixture) -> None:
    group = rw.new_group(range(comm.size))
    rank, works = rw.get_rank(), []
    for number in range(3):
        if rank == 0:
            works.append(rw.send(value_of(0, 1, number), 1, group=group, async_op=True))
        elif rank == 1:
            works.append(rw.recv(0, group=group, async_op=True))
    group.close()
    assert all(work.done() for work in works)
    assert ("never waited for: " in caplog.text) == (rank < 2)
    if rank == 1:
        assert all(same(work.wait(), value_of(0, 1, number)) for number, work in enumerate(works))
    for call in (rw.send, lambda _, other, **more: rw.recv(other, **more)):
        with pytest.raises(rw.InvalidArgumentError, match="this group is closed"):
            call(1, (rank + 1) % comm.size, group=group, async_op=True)
    assert rw.all_reduce(1) == comm.size


def test_a_transfer_that_is_pending_in_a_closed_group_alone_ends(comm: Group, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank closes the group without the call."""
    group = rw.new_group(range(comm.size))
    works: list[rw.Work[Any]] = []
    if comm.rank == 0:
        works = [rw.recv(1, group=group, async_op=True), rw.send(1, 1, group=group, async_op=True)]
    group.close()
    for work in works:
        with pytest.raises(rw.CollectiveError, match="rank 1 closed the group"):
            work.wait()
    assert caplog.text.count("failed, and was never waited for") == len(works)
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2)
def test_threads_use_the_two_directions_at_once(comm: Group) -> None:
    rank, other = rw.get_rank(), 1 - rw.get_rank()
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.extend(rw.recv(other) for _ in range(20)))
    thread.start()
    for number in range(20):
        rw.send(value_of(rank, other, number % 6), other)
    thread.join()
    assert len(received) == 20
    assert all(same(value, value_of(other, rank, number % 6)) for number, value in enumerate(received))
    assert rw.all_reduce(1) == comm.size
