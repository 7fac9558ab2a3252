"""Awaiting a collective in an asyncio program."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks("serial", 1, 2, 3)

T = TypeVar("T")
LARGE = 100_000


def run(program: Coroutine[Any, Any, T]) -> T:
    """Run a program, and fail if its loop reports an error that nobody has retrieved."""
    problems: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        return await program

    result = asyncio.run(watched())
    assert not problems
    return result


class Slow:
    """A value that waits for an event while it is pickled."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[object, ...]:
        self.started.set()
        assert self.go.wait(200)
        return int, ()


def test_a_result_is_awaited_while_the_loop_runs(comm: Group) -> None:
    value = Slow()

    async def program() -> None:
        work: rw.Work[list[Any]] = rw.all_gather(value, async_op=True)
        asyncio.get_running_loop().call_soon(value.go.set)  # the loop has to run for the collective to end
        assert await work == [0] * comm.size
        assert await work == work.wait(), "again, and done"
        assert await rw.all_reduce(1, async_op=True) == comm.size
        await rw.barrier(async_op=True)

    run(program())


def test_several_are_awaited_at_once_in_different_groups(comm: Group) -> None:
    groups = [rw.new_group(range(comm.size)) for _ in range(3)]

    async def reduce(group: Group, number: int) -> float:
        total = 0.0
        for _ in range(5):
            small = await rw.all_reduce(number, group=group, async_op=True)
            large = await rw.all_reduce(torch.full((LARGE,), float(number)), group=group, async_op=True)
            total += small + large.sum().item()
        return total

    async def program() -> list[float]:
        tasks = [reduce(group, number) for number, group in enumerate(groups)]
        return await asyncio.gather(*(tasks if rw.get_rank() else tasks[::-1]))

    totals = run(program())
    assert sorted(totals) == [5.0 * number * comm.size * (LARGE + 1) for number in range(3)]


def test_several_are_awaited_at_once_in_one_group(comm: Group) -> None:
    async def program() -> list[Any]:
        works = [rw.all_reduce(number, async_op=True) for number in range(20)]
        return await asyncio.gather(*works[::-1])

    assert run(program()) == [number * comm.size for number in reversed(range(20))]


def test_errors_arrive_as_usual(comm: Group) -> None:
    async def program() -> None:
        work = rw.all_reduce(1, "nonsense" if rw.get_rank() == 0 else "sum", async_op=True)
        for _ in range(2):
            with pytest.raises(rw.InvalidArgumentError if rw.get_rank() == 0 else rw.RemoteRankError, match="nonsense"):
                await work
        results = await asyncio.gather(rw.all_reduce(1, async_op=True), work, return_exceptions=True)
        assert results[0] == comm.size
        assert isinstance(results[1], rw.RankwiseError)

    run(program())


def test_a_task_that_is_cancelled_leaves_the_group_usable(comm: Group) -> None:
    """The other ranks wait for the call, so it is made in spite of the cancellation."""
    value = Slow()

    async def wait(work: rw.Work[T]) -> T:
        return await work

    async def program() -> None:
        work: rw.Work[list[Any]] = rw.all_gather(value, async_op=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(work), timeout=0.05)
        task = asyncio.create_task(wait(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        later = rw.all_reduce(1, async_op=True)
        value.go.set()
        assert await later == comm.size
        assert await work == [0] * comm.size

    run(program())
    assert rw.all_reduce(1) == comm.size


def test_a_loop_that_ends_before_its_collective_does_no_harm(comm: Group, caplog: pytest.LogCaptureFixture) -> None:
    value = Slow()

    async def wait(work: rw.Work[list[Any]]) -> None:
        await work

    async def program() -> tuple[rw.Work[list[Any]], asyncio.Task[None]]:
        work: rw.Work[list[Any]] = rw.all_gather(value, async_op=True)
        task = asyncio.create_task(wait(work))
        await asyncio.sleep(0)
        return work, task

    work, task = run(program())
    assert task.cancelled()
    value.go.set()
    assert work.wait() == [0] * comm.size
    assert not caplog.records
    assert asyncio.run(_awaited(work)) == [0] * comm.size, "in another loop"


async def _awaited(work: rw.Work[T]) -> T:
    return await work


def test_a_call_that_is_refused_is_named(comm: Group) -> None:
    """A blocking call while another thread is in one: as without a loop."""
    value = Slow()

    async def program() -> str:
        blocking: asyncio.Task[list[Any]] = asyncio.create_task(asyncio.to_thread(rw.all_gather, value))
        assert await asyncio.to_thread(value.started.wait, 200)
        with pytest.raises(rw.CollectiveError) as raised:
            await rw.all_reduce(1, async_op=True)
        value.go.set()
        assert await blocking == [0] * comm.size
        return str(raised.value)

    assert re.search(
        r"all_reduce at test_awaiting.py:\d+ cannot begin in thread 'MainThread': thread '\S+' is in all_gather",
        run(program()),
    )
