"""`async_op=True`: the same results and errors as blocking calls, in the order in which the program makes the calls."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.control.call import Call
from rankwise._comm.control.turns import Turns, WorkQueue
from rankwise._comm.group import Group
from tests.lanes import variants

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3),
    pytest.mark.usefixtures("no_thread_stays"),
]

HERE = r"test_non_blocking\.py:\d+"
LARGE = 200_000

Start = Callable[..., Any]


def tensors(comm: Group) -> list[torch.Tensor]:
    return [torch.full((4,), float(rw.get_rank() + index)) for index in range(comm.size)]


# Each takes the arguments that are common to blocking and non-blocking calls.
COLLECTIVES: dict[str, Callable[[Group, dict[str, Any]], Any]] = {
    "all_reduce": lambda _, more: rw.all_reduce({"loss": 0.5, "t": torch.ones(2) * rw.get_rank()}, "mean", **more),
    "all_reduce of much": lambda _, more: rw.all_reduce(torch.ones(LARGE), **more),
    "all_reduce_": lambda _, more: rw.all_reduce_(torch.ones(3), **more),
    "reduce_scatter": lambda comm, more: rw.reduce_scatter(tensors(comm), **more),
    "all_gather": lambda _, more: rw.all_gather({"rank": rw.get_rank()}, **more),
    "all_gather of much": lambda _, more: rw.all_gather(torch.full((LARGE + rw.get_rank(),), 1.5), **more),
    "all_gather_cat": lambda _, more: rw.all_gather_cat(torch.full((2, 1), rw.get_rank()), dim=1, **more),
    "gather": lambda _, more: rw.gather(f"rank {rw.get_rank()}", **more),
    "gather of much": lambda comm, more: rw.gather(torch.ones(LARGE), dst=comm.ranks[-1], **more),
    "broadcast": lambda _, more: rw.broadcast(["a", rw.get_rank()], **more),
    "broadcast of much": lambda _, more: rw.broadcast(torch.full((LARGE,), rw.get_rank()), **more),
    "scatter": lambda comm, more: rw.scatter([f"for {rank}" for rank in range(comm.size)], **more),
    "reduce": lambda comm, more: rw.reduce({"loss": 0.5, "t": torch.ones(2)}, "mean", dst=comm.ranks[-1], **more),
    "reduce of much": lambda _, more: rw.reduce(torch.ones(LARGE), **more),
    "all_to_all": lambda comm, more: rw.all_to_all([(rw.get_rank(), rank) for rank in range(comm.size)], **more),
    "all_to_all of much": lambda comm, more: rw.all_to_all(torch.ones(comm.size, LARGE) * rw.get_rank(), **more),
    "barrier": lambda _, more: rw.barrier("here", timeout=60, **more),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_results_are_those_of_blocking_calls(comm: Group) -> None:
    group = rw.new_group(range(comm.size))
    blocking = {name: call(comm, {}) for name, call in COLLECTIVES.items()}
    works = {name: call(comm, {"async_op": True}) for name, call in COLLECTIVES.items()}
    others = {name: call(comm, {"async_op": True, "group": group}) for name, call in COLLECTIVES.items()}
    for name in reversed(COLLECTIVES):
        assert isinstance(works[name], rw.Work)
        assert same(works[name].wait(), blocking[name]), name
        assert works[name].done()
        assert works[name].wait() is works[name].wait(), name
        assert same(others[name].wait(timeout=60), blocking[name]), name


def test_a_call_starts_at_once_and_a_blocking_one_runs_after_those_that_are_pending(comm: Group) -> None:
    """On rank zero the value of the first call waits for the program, so that nothing can end before."""
    go = threading.Event()
    order: list[str] = []

    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            assert go.wait(200)
            order.append("first")
            return int, ()

    works = [rw.all_gather(Slow() if rw.get_rank() == 0 else 0, async_op=True)]
    works += [rw.all_gather(number, async_op=True) for number in range(1, 50)]
    if rw.get_rank() == 0:
        assert not works[0].done()
        assert re.fullmatch(rf"<Work all_gather at {HERE}, pending>", repr(works[0]))
        with pytest.raises(rw.CollectiveTimeoutError, match=rf"all_gather at {HERE} has not ended within 0.01 s"):
            works[0].wait(timeout=0.01)
        threading.Timer(0.05, go.set).start()
    assert rw.all_gather("blocking") == ["blocking"] * comm.size
    assert all(work.done() for work in works)
    assert order == ["first"] * (rw.get_rank() == 0)
    assert [work.wait() for work in reversed(works)] == [[number] * comm.size for number in reversed(range(50))]


def test_a_call_that_begins_while_the_next_one_is_started_is_not_in_its_way(
    comm: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, begun, go = threading.Event(), threading.Event(), threading.Event()
    acquire, is_run_by = Turns.acquire, WorkQueue.is_run_by

    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            begun.set()
            assert go.wait(200)
            return int, ()

    def acquire_later(turns: Turns, call: Call) -> None:
        assert may_begin.wait(200)
        acquire(turns, call)

    def look_before(queue: WorkQueue, thread: threading.Thread) -> bool:
        result = is_run_by(queue, thread)
        may_begin.set()
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(200)
        return result

    rw.barrier()
    monkeypatch.setattr(Turns, "acquire", acquire_later)
    first: rw.Work[list[Any]] = rw.all_gather(Slow(), async_op=True)
    monkeypatch.setattr(WorkQueue, "is_run_by", look_before)
    try:
        second = rw.all_reduce(1, async_op=True)
    finally:
        monkeypatch.undo()
        may_begin.set()
        go.set()
    assert first.wait() == [0] * comm.size
    assert second.wait() == comm.size


def test_all_reduce_writes_into_the_tensor(comm: Group) -> None:
    tensor = torch.ones(LARGE)
    work = rw.all_reduce_(tensor, async_op=True)
    assert work.wait() is tensor
    assert tensor.sum() == LARGE * comm.size


def test_an_error_of_one_rank_is_raised_by_wait_on_all(comm: Group) -> None:
    last = comm.ranks[-1]
    calls: list[tuple[Callable[[], Any], Callable[[], Any], type[Exception]]] = [
        (lambda: rw.all_reduce(1, "nonsense", async_op=True), lambda: rw.all_reduce(1, async_op=True), ValueError),
        (lambda: rw.all_gather(threading.Lock(), async_op=True), lambda: rw.all_gather(1, async_op=True), TypeError),
        (
            lambda: rw.scatter([3] * 9, src=last, async_op=True),
            lambda: rw.scatter(None, src=last, async_op=True),
            ValueError,
        ),
        (lambda: rw.reduce(1, dst=99, async_op=True), lambda: rw.reduce(1, async_op=True), ValueError),
        (
            lambda: rw.all_to_all([1] * 9, async_op=True),
            lambda: rw.all_to_all([1] * comm.size, async_op=True),
            ValueError,
        ),
        (lambda: rw.barrier(3, async_op=True), lambda: rw.barrier(async_op=True), ValueError),  # type: ignore[call-overload]
    ]
    for wrong, right, kind in calls:
        work = (wrong if rw.get_rank() == last else right)()
        after = rw.all_reduce(1, async_op=True)
        assert after.wait() == comm.size, "the next call works"
        for _ in range(2):
            with pytest.raises(kind if rw.get_rank() == last else rw.RemoteRankError) as raised:
                work.wait()
            assert len(raised.traceback) == 2, "the line of the program, and `wait`"
        assert isinstance(raised.value, rw.RankwiseError)
        for note in raised.value.__notes__:
            assert re.fullmatch(rf"Raised by \w+ at {HERE}, which was started with async_op=True.", note)


def test_arguments_that_exclude_each_other_are_refused_at_once_on_all(comm: Group) -> None:
    value = torch.ones(2, requires_grad=True)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"async_op": True, "differentiable": True}, "cannot be combined"),
        ({"async_op": "yes"}, "async_op='yes', of type str, is not True or False"),
        ({"async_op": True, "differentiable": 1}, "differentiable=1, of type int, is not True or False"),
    ]
    for more, text in wrong:
        if rw.get_rank() == 0:
            with pytest.raises(rw.InvalidArgumentError, match=text):
                rw.all_reduce(value, **more)
        else:
            with pytest.raises(rw.RemoteRankError, match=text):
                rw.all_reduce(value, async_op=True).wait()
    assert rw.all_reduce(1) == comm.size


def test_a_call_that_cannot_be_started_raises_at_once(comm: Group) -> None:
    group = rw.new_group([0])
    if rw.get_rank():
        with pytest.raises(rw.InvalidArgumentError, match="not a member"):
            rw.all_reduce(1, group=group, async_op=True)
    group.close()
    with pytest.raises(rw.InvalidArgumentError, match="this group is closed"):
        rw.all_reduce(1, group=group, async_op=True)
    with pytest.raises(rw.InvalidArgumentError, match="is not a group"):
        rw.all_reduce(1, group=3, async_op=True)  # type: ignore[call-overload]
    with rw.one_rank_only() as mine:
        if mine:
            with pytest.raises(
                rw.CollectiveError, match=rf"barrier at {HERE} cannot begin inside of the block of one_rank"
            ):
                rw.barrier(async_op=True)
    checked = rw.barrier(async_op=True)
    checked.wait()
    with pytest.raises(rw.InvalidArgumentError, match="timeout=0 is not a number of seconds above 0"):
        checked.wait(timeout=0)
    assert rw.all_reduce(1) == comm.size


def test_a_thread_that_cannot_be_started_is_an_error_on_all(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if rw.get_rank() == 0:
        with monkeypatch.context() as patch, pytest.raises(rw.CollectiveError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", fail)
            rw.all_reduce(1, async_op=True)
    else:
        with pytest.raises(rw.RemoteRankError, match="can't start new thread"):
            rw.all_reduce(1, async_op=True).wait()
    assert rw.all_reduce(1, async_op=True).wait() == comm.size


def test_a_value_that_waits_for_its_own_call_is_refused(comm: Group) -> None:
    class Waiting:
        def __reduce__(self) -> tuple[object, ...]:
            return str, (str(_error_of(works[0].wait)) + str(_error_of(lambda: rw.barrier(async_op=True))),)

    def _error_of(call: Callable[[], object]) -> BaseException:
        with pytest.raises(rw.CollectiveError) as raised:
            call()
        return raised.value

    go = threading.Event()

    class First:
        def __reduce__(self) -> tuple[object, ...]:
            assert go.wait(200)
            return int, ()

    first: rw.Work[list[Any]] = rw.all_gather(First(), async_op=True)
    works = [rw.all_gather(Waiting(), async_op=True)]
    go.set()
    assert first.wait() == [0] * comm.size
    for text in works[0].wait():
        assert re.search(rf"all_gather at {HERE} cannot be waited for inside of all_gather at {HERE}", str(text))
        assert re.search(rf"barrier at {HERE} cannot begin inside of all_gather at {HERE}", str(text))
    assert rw.all_reduce(1) == comm.size


def test_a_call_inside_of_a_blocking_one_is_refused(comm: Group) -> None:
    messages: list[str] = []

    class Calling:
        def __reduce__(self) -> tuple[object, ...]:
            with pytest.raises(rw.CollectiveError) as raised:
                rw.barrier(async_op=True)
            messages.append(str(raised.value))
            return int, ()

    gathered: list[Any] = rw.all_gather(Calling())
    assert gathered == [0] * comm.size
    assert re.search(rf"barrier at {HERE} cannot begin inside of all_gather at {HERE}", messages[0])


@contextmanager
def default_dtype_and_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": default_dtype_and_device,
}


@pytest.mark.ranks("serial", 2)
@pytest.mark.parametrize("mode", variants(MODES, fast={"none", "default device"}))
def test_results_do_not_depend_on_the_thread(comm: Group, mode: str) -> None:
    values: list[Any] = [
        torch.ones(3, dtype=dtype, requires_grad=dtype.is_floating_point, device="cpu")
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    ]
    values.append({"a": values[0], "b": 2, "c": torch.ones(LARGE, device="cpu")})
    starts: list[Start] = [
        lambda value, **more: rw.all_reduce(value, "sum", **more),
        lambda value, **more: rw.all_reduce(value, "mean", **more),
        lambda value, **more: rw.all_reduce(value, "product", **more),
        lambda value, **more: rw.reduce(value, dst=rw.get_world_size() - 1, **more),
        lambda value, **more: rw.all_to_all([value] * rw.get_world_size(), **more),
        rw.all_gather,
        rw.broadcast,
    ]
    with MODES[mode]():
        for value in values:
            for start in starts:
                blocking, other = start(value), start(value, async_op=True).wait()
                assert describe(blocking) == describe(other)


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype, value.device, value.requires_grad, value.is_leaf, value.is_inference()
    if isinstance(value, dict):
        return {key: describe(one) for key, one in value.items()}
    return [describe(one) for one in value] if isinstance(value, list) else value


def test_values_are_converted_in_the_context_of_the_caller(comm: Group) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    class Reading:
        def __reduce__(self) -> tuple[object, ...]:
            return tuple, ([variable.get(), torch.get_num_threads()],)

    gathered: list[Any] = rw.all_gather(Reading(), async_op=True).wait()
    assert gathered == [(5, torch.get_num_threads())] * comm.size


def test_values_are_released_when_the_call_has_ended_and_results_with_the_work(comm: Group) -> None:
    value = torch.ones(3)
    work = rw.all_reduce(value, async_op=True)
    result = weakref.ref(work.wait())
    released = weakref.ref(value)
    del value
    gc.collect()
    assert released() is None
    assert result() is not None
    del work
    assert result() is None
    with pytest.raises(TypeError):
        rw.all_reduce(object(), async_op=True).wait()


def test_works_that_nobody_waits_for_are_logged_when_their_group_is_closed(
    comm: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group = rw.new_group(range(comm.size))
    with caplog.at_level(logging.WARNING, logger="rankwise"):
        kept = [rw.all_reduce(number, group=group, async_op=True) for number in range(3)]
        for _ in range(2):
            rw.barrier("dropped", group=group, async_op=True)
        rw.all_reduce(1, "nonsense", group=group, async_op=True)
        assert rw.all_reduce(2, group=group, async_op=True).wait() == 2 * comm.size
        group.close()
    messages = sorted(record.getMessage() for record in caplog.records)
    expected = [
        rf"all_reduce at {HERE} failed, and was never waited for: .*InvalidArgumentError: op='nonsense'.*",
        rf"started with async_op=True, and never waited for: all_reduce at {HERE}, 3 times",
        rf"started with async_op=True, and never waited for: all_reduce at {HERE}",
        rf"started with async_op=True, and never waited for: barrier at {HERE}, 2 times",
    ]
    assert len(messages) == len(expected)
    assert all(map(re.fullmatch, expected, messages)), messages
    assert [work.wait() for work in kept] == [0, comm.size, 2 * comm.size], "also after the end of the group"


def test_a_group_that_is_left_with_an_error_ends_its_works(comm: Group, caplog: pytest.LogCaptureFixture) -> None:
    group = rw.new_group(range(comm.size))
    rw.barrier()
    works: list[rw.Work[Any]] = []
    go = threading.Event()

    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            assert go.wait(200)
            return int, ()

    with pytest.raises(KeyError), group:
        works = [rw.all_gather(Slow(), group=group, async_op=True), rw.barrier(group=group, async_op=True)]
        raise KeyError("no data")
    go.set()
    with pytest.raises(rw.CollectiveError, match=rf"barrier at {HERE} was not made: its group was closed before"):
        works[1].wait()
    with suppress(rw.RankwiseError):  # it may have been sent before
        works[0].wait()
    assert "never waited for: all_gather" in caplog.text
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_ranks_that_call_in_different_orders_get_an_error(comm: Group) -> None:
    calls: list[Callable[[], rw.Work[Any]]] = [
        lambda: rw.all_reduce(1, async_op=True),
        lambda: rw.all_gather(torch.ones(LARGE), async_op=True),
        lambda: rw.barrier(async_op=True),
    ]
    works = [call() for call in (calls if rw.get_rank() else [calls[1], calls[0], calls[2]])]
    for work in works[:2]:
        with pytest.raises(rw.MismatchError) as raised:
            work.wait()
        assert re.search(rf"all_reduce\(op='sum'\) at {HERE}", str(raised.value))
        assert re.search(rf"all_gather\(\) at {HERE}", str(raised.value))
    works[2].wait()
    mixed = rw.all_reduce(1, async_op=True) if rw.get_rank() else rw.barrier
    with pytest.raises(rw.MismatchError, match=rf"barrier\(\) at {HERE}"):
        mixed.wait() if isinstance(mixed, rw.Work) else mixed()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_a_rank_that_never_calls_is_named(comm: Group) -> None:
    """A barrier has a timeout of its own; the calls after it work."""
    work = rw.barrier("alone", timeout=0.3, async_op=True) if rw.get_rank() else None
    if work is not None:
        with pytest.raises(rw.CollectiveTimeoutError, match=rf"barrier 'alone' at {HERE}.*Missing: rank 0"):
            work.wait()
        with pytest.raises(rw.CollectiveTimeoutError):
            work.wait()
    else:
        time.sleep(0.5)
        with pytest.raises(rw.CollectiveTimeoutError):
            rw.barrier("alone", timeout=60, async_op=True).wait()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_groups_do_not_wait_for_each_other(comm: Group) -> None:
    """Ranks wait in different orders in two groups: a deadlock if the calls of both were in one thread."""
    groups = [rw.new_group(range(comm.size)) for _ in range(2)]
    order = groups if rw.get_rank() else groups[::-1]
    for _ in range(5):
        works = {id(group): rw.all_reduce(torch.ones(LARGE), group=group, async_op=True) for group in order}
        assert rw.all_reduce(1) == comm.size
        assert [works[id(group)].wait().sum() for group in groups] == [LARGE * comm.size] * 2
        ranks = [rw.all_gather(rw.get_rank(), group=group, async_op=True) for group in order]
        assert [work.wait() for work in ranks[::-1]] == [list(range(comm.size))] * 2


class Slow:
    def __reduce__(self) -> tuple[object, ...]:
        time.sleep(2.5)  # several looks for a deadlock
        return int, ()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_pending_call_of_one_rank_is_not_taken_for_a_deadlock(comm: Group) -> None:
    """The main threads wait in different groups, and only one rank has a pending call, whose value takes a while."""
    first, second = (rw.new_group(range(comm.size)) for _ in range(2))
    if rw.get_rank():
        work: rw.Work[list[Any]] = rw.all_gather(Slow(), group=first, async_op=True)
        assert rw.all_gather(0, group=second) == [0] * 2
        assert work.wait() == [0] * 2
    else:
        assert rw.all_gather(0, group=first) == [0] * 2
        assert rw.all_gather(0, group=second) == [0] * 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_pending_calls_are_not_taken_for_a_deadlock(comm: Group) -> None:
    """Both main threads wait in different groups, while their values for the other group take a while."""
    groups = [rw.new_group(range(comm.size)) for _ in range(2)]
    mine, other = groups if rw.get_rank() else groups[::-1]
    work: rw.Work[list[Any]] = rw.all_gather(Slow(), group=other, async_op=True)
    assert rw.all_gather(0, group=mine) == [0] * 2
    assert work.wait() == [0] * 2


def test_a_forked_child_cannot_wait(comm: Group) -> None:
    go = threading.Event()

    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            assert go.wait(200)
            return int, ()

    done = rw.all_reduce(1, async_op=True)
    assert done.wait() == comm.size
    pending: rw.Work[list[Any]] = rw.all_gather(Slow(), async_op=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert done.wait() == comm.size
            assert done.done()
            assert not pending.done()
            with pytest.raises(rw.NotJoinedError, match="forked"):
                pending.wait()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    go.set()
    assert status == 0
    assert pending.wait() == [0] * comm.size


def test_a_signal_handler_may_start_a_call_while_the_program_waits(comm: Group, tmp_path: Path) -> None:
    """Here the handler stands for one that runs while `wait` blocks: the call comes after those that are pending."""
    import signal  # noqa: PLC0415

    started: list[rw.Work[int]] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: started.append(rw.all_reduce(2, async_op=True)))
    try:
        go = threading.Event()

        class Slow:
            def __reduce__(self) -> tuple[object, ...]:
                os.kill(os.getpid(), signal.SIGUSR2)
                assert go.wait(200)
                return int, ()

        work: rw.Work[list[Any]] = rw.all_gather(Slow(), async_op=True)
        while not started:
            time.sleep(0.01)
        go.set()
        assert work.wait() == [0] * comm.size
        assert started[0].wait() == 2 * comm.size
    finally:
        signal.signal(signal.SIGUSR2, before)
