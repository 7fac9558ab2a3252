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
from rankwise._comm.group import Comm

pytestmark = pytest.mark.ranks("serial", 1, 2, 3)

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


def test_another_thread_is_refused(comm: Comm) -> None:
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


def test_a_thread_with_its_own_group_is_not_refused(comm: Comm) -> None:
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


def test_a_signal_handler_is_refused(comm: Comm) -> None:
    messages: list[str] = []
    with at_signal(lambda: messages.append(refused(rw.barrier))):
        gathered: list[Any] = rw.all_gather(Pickled(lambda: os.kill(os.getpid(), signal.SIGUSR2)))
    assert gathered == [0] * comm.size
    assert re.search(rf"barrier at {HERE} cannot begin inside of all_gather at {HERE}", messages[0])
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


@pytest.mark.ranks(2, 3)
def test_a_signal_handler_is_refused_while_its_rank_waits(comm: Comm, tmp_path: Path) -> None:
    rank, size = rw.get_rank(), comm.size
    messages: list[str] = []

    def call() -> None:
        messages.append(refused(rw.barrier))
        (tmp_path / str(rank)).touch()

    def send() -> None:
        while not comm_of(comm)._guard._lock.locked():
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
