"""One collective at a time in a group: another one is refused at once, and the message has both call sites."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.call import Call
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks("serial", 1, 2, 3)

LARGE = 50_000
HERE = r"test_concurrent_calls\.py:\d+"


class Pickled:
    """A value that calls a function while it is pickled: during a collective, in any world."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, ...]:
        self.call()
        return int, ()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(rw.CollectiveError) as raised:
        call()
    return str(raised.value)


def test_another_thread_is_refused(comm: Group) -> None:
    for _ in range(20):
        messages: list[str] = []

        def in_thread(messages: list[str] = messages) -> None:
            thread = threading.Thread(target=lambda: messages.append(refused(lambda: rw.all_reduce(1))), name="other")
            thread.start()
            thread.join()

        gathered: list[Any] = rw.all_gather(Pickled(in_thread))
        assert gathered == [0] * comm.size
        assert re.search(rf"all_reduce at {HERE} cannot begin in thread 'other'", messages[0])
        assert re.search(rf"'MainThread' is in all_gather at {HERE}", messages[0])
        assert rw.all_reduce(1) == comm.size, "and the next collective works"


# The arguments of both are the group, and `async_op` if it is given.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda _, **more: rw.all_reduce(torch.ones(LARGE), **more),
    "all_reduce_": lambda _, **more: rw.all_reduce_(torch.ones(LARGE), **more),
    "reduce_scatter": lambda size, **more: rw.reduce_scatter([torch.ones(LARGE)] * size, **more),
    "all_gather": lambda _, **more: rw.all_gather(torch.ones(LARGE), **more),
    "all_gather_cat": lambda _, **more: rw.all_gather_cat(torch.ones(LARGE), **more),
    "gather": lambda _, **more: rw.gather(torch.ones(LARGE), **more),
    "broadcast": lambda _, **more: rw.broadcast(torch.ones(LARGE), **more),
    "scatter": lambda size, **more: rw.scatter([torch.ones(LARGE)] * size, **more),
    "reduce": lambda _, **more: rw.reduce(torch.ones(LARGE), **more),
    "all_to_all": lambda size, **more: rw.all_to_all([torch.ones(LARGE)] * size, **more),
    "barrier": lambda _, **more: rw.barrier(**more),
}


def test_every_collective_in_another_thread_is_refused_also_a_non_blocking_one(comm: Group) -> None:
    messages: dict[str, str] = {}

    def in_thread() -> None:
        for title, call in CALLS.items():
            messages[title] = refused(lambda call=call: call(comm.size))  # type: ignore[misc]
            messages[f"{title}, async_op"] = refused(lambda call=call: call(comm.size, async_op=True))  # type: ignore[misc]

    def start() -> None:
        thread = threading.Thread(target=in_thread, name="other")
        thread.start()
        thread.join()

    gathered: list[Any] = rw.all_gather(Pickled(start))
    assert gathered == [0] * comm.size
    assert len(messages) == 2 * len(CALLS)
    for title, message in messages.items():
        assert re.search(rf"{title.partition(',')[0]} at {HERE} cannot begin in thread 'other'", message)
        assert re.search(rf"'MainThread' is in all_gather at {HERE}", message)
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


@pytest.mark.ranks(2, 3)
def test_another_thread_is_refused_while_any_collective_waits(comm: Group, tmp_path: Path) -> None:
    """On the last rank, since the others come late: they wait until its other thread was refused."""
    last = rw.get_rank() == comm.size - 1
    for title, call in CALLS.items():
        refusal: list[str] = []
        file = tmp_path / title

        def in_thread(refusal: list[str] = refusal, file: Path = file) -> None:
            while not comm_of(comm).control.turns._lock.locked():
                time.sleep(0.01)
            refusal.append(refused(rw.barrier))
            file.touch()

        thread = threading.Thread(target=in_thread, name="other")
        if last:
            thread.start()
        while not last and not file.exists():
            time.sleep(0.01)
        call(comm.size)
        if last:
            thread.join()
            assert re.search(rf"barrier at {HERE} cannot begin in thread 'other'", refusal[0])
            assert re.search(rf"'MainThread' is in {title} at {HERE}", refusal[0])
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_another_thread_is_refused_between_the_agreement_on_a_call_and_its_data(
    comm: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the data is known after the first agreement, and the ranks agree once more when they have memory."""
    texts: dict[str, str] = {}
    begin_data = Call.begin_data

    def call_in_thread() -> None:
        try:
            rw.barrier()
        except rw.RankwiseError as error:
            texts[title] = str(error)  # gather agrees twice more, and the thread is refused each time

    def begin_later(call: Call) -> None:
        thread = threading.Thread(target=call_in_thread, name="other")
        thread.start()
        thread.join()
        begin_data(call)

    titles = ["all_gather", "gather", "broadcast", "scatter", "all_to_all"]
    for title in titles:
        with monkeypatch.context() as patch:
            if rw.get_rank() == 0:
                patch.setattr(Call, "begin_data", begin_later)
            CALLS[title](comm.size)
    assert len(texts) == (len(titles) if rw.get_rank() == 0 else 0)
    for title, text in texts.items():
        assert re.search(rf"barrier at {HERE} cannot begin in thread 'other'.*'MainThread' is in {title} at", text)
    assert rw.all_reduce(1) == comm.size


def test_two_threads_use_every_collective_in_two_groups(comm: Group) -> None:
    groups = [rw.new_group(range(comm.size)) for _ in range(2)]
    ended: list[int] = []

    def work(group: Group) -> None:
        for _ in range(5):
            for call in CALLS.values():
                call(comm.size, group=group)
                call(comm.size, group=group, async_op=True).wait()
        assert rw.all_reduce(torch.ones(LARGE), group=group).sum() == LARGE * comm.size
        ended.append(rw.all_reduce(1, group=group))

    thread = threading.Thread(target=work, args=(groups[0],))
    thread.start()
    work(groups[1])
    thread.join()
    assert ended == [comm.size] * 2


def test_an_error_in_the_group_of_one_thread_does_not_disturb_the_other(comm: Group) -> None:
    rank, groups = rw.get_rank(), [rw.new_group(range(comm.size)) for _ in range(2)]
    errors: list[str] = []

    def fail() -> None:
        for number in range(20):
            wrong = rank == number % comm.size
            with pytest.raises(rw.InvalidArgumentError if wrong else rw.RemoteRankError) as raised:
                rw.all_reduce(torch.ones(LARGE), "nonsense" if wrong else "sum", group=groups[0])
            errors.append(str(raised.value))
        assert rw.all_reduce(1, group=groups[0]) == comm.size

    thread = threading.Thread(target=fail)
    thread.start()
    for _ in range(20):
        assert rw.all_reduce(torch.ones(LARGE), group=groups[1]).sum() == LARGE * comm.size
    thread.join()
    assert len(errors) == 20


def test_a_thread_with_its_own_group_is_not_refused(comm: Group) -> None:
    """The main thread uses one group, with small and large values, while another thread uses its own."""
    group = rw.new_group(range(comm.size))
    results: list[float] = []

    def work() -> None:
        for _ in range(50):
            results.extend((rw.all_reduce(1, group=group), rw.all_reduce(torch.ones(20_000), group=group).sum().item()))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(50):
        assert rw.all_reduce(torch.ones(20_000)).sum().item() == 20_000 * comm.size
        rw.barrier()
    thread.join()
    assert results == [comm.size, 20_000 * comm.size] * 50


@contextmanager
def at_signal(call: Callable[[], object]) -> Iterator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        call()

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_handler_is_refused(comm: Group) -> None:
    messages: list[str] = []
    with at_signal(lambda: messages.append(refused(rw.barrier))):
        gathered: list[Any] = rw.all_gather(Pickled(lambda: os.kill(os.getpid(), signal.SIGUSR2)))
    assert gathered == [0] * comm.size
    assert re.search(rf"barrier at {HERE} cannot begin inside of all_gather at {HERE}", messages[0])
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


@pytest.mark.ranks(2, 3)
def test_a_signal_handler_is_refused_while_its_rank_waits(comm: Group, tmp_path: Path) -> None:
    rank, size = rw.get_rank(), comm.size
    messages: list[str] = []

    def call() -> None:
        messages.append(refused(rw.barrier))
        (tmp_path / str(rank)).touch()

    def send() -> None:
        while not comm_of(comm).control.turns._lock.locked():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    rw.barrier()
    with at_signal(call):
        if rank:
            thread = threading.Thread(target=send)
            thread.start()
        while not rank and len(list(tmp_path.iterdir())) < size - 1:
            time.sleep(0.01)
        assert rw.all_reduce(torch.ones(20_000)).sum().item() == 20_000 * size
        if rank:
            thread.join()
    assert len(messages) == (rank > 0)
    assert all(re.search(rf"barrier at {HERE} cannot begin inside of all_reduce at {HERE}", text) for text in messages)
