"""Stop: a signal to any rank, or a time limit, is seen by all ranks at the same step."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._training import stopping
from tests.tables import each_row

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def no_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def own_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def stopped_at(stop: rw.Stop, signals: Mapping[int, int], *, skews: Iterator[float] | None = None) -> int:
    """Return the step at which a loop ends whose rank gets these signals, by step."""
    for step in range(10_000):
        if step in signals:
            own_signal(signals[step])
        if skews is not None:
            time.sleep(next(skews))
        if stop.agreed():
            return step
    raise AssertionError("the loop has not ended")


@pytest.mark.ranks("serial", 1, 2, 3)
@each_row("number", SIGNALS, collective=True)
def test_a_signal_to_the_last_rank_ends_the_loop_on_all(comm: Group, number: signal.Signals) -> None:
    last = comm.size - 1
    with rw.Stop() as stop:
        assert stop.reason is None
        assert stopped_at(stop, {3: number} if rw.get_rank() == last else {}) == 3
        assert stop.reason == f"rank {last} received {number.name}"
        if rw.get_rank() == 0:
            assert stop.agreed()  # Local by now
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 4)
@pytest.mark.soak(100)
def test_ranks_agree_under_random_skews(comm: Group, seed: int) -> None:
    """Ten stops, each by signals to some ranks at random steps, with ranks that run ahead of each other."""
    shared = random.Random(seed)  # noqa: S311 - repeatable
    own = random.Random(seed * 100 + rw.get_rank())  # noqa: S311
    for _ in range(10):
        every = shared.choice((1, 1, 3))
        plans = [
            {shared.randrange(30): shared.choice(SIGNALS) for _ in range(shared.choice((0, 1, 2)))}
            for _ in range(comm.size)
        ]
        plans[shared.randrange(comm.size)] = {shared.randrange(30): signal.SIGTERM}
        skews = iter(lambda: own.choice((0, 0, 0, 1e-4, 1e-3)), None)
        with rw.Stop(every=every) as stop:
            step = stopped_at(stop, plans[rw.get_rank()], skews=skews)
            first = min(min(plan) for plan in plans if plan)
            assert step == first + (-first - 1) % every
            assert len(set(rw.all_gather(f"{step} {stop.reason}"))) == 1


@pytest.mark.ranks(2)
def test_agreements_are_left_out_by_every(comm: Group) -> None:
    with rw.Stop(every=4) as stop:
        if rw.get_rank() == 0:
            own_signal(signal.SIGUSR2)
            assert not any(stop.agreed() for _ in range(3))  # alone, without a message
            rw.barrier()
        else:
            rw.barrier()
            assert not any(stop.agreed() for _ in range(3))
        assert stop.agreed()


@pytest.mark.ranks(2)
def test_ranks_that_count_otherwise_are_told(comm: Group) -> None:
    with rw.Stop(every=1 + rw.get_rank()) as stop, pytest.raises(rw.MismatchError, match="every"):
        while not stop.agreed():
            pass
    with rw.Stop() as stop, pytest.raises(rw.MismatchError, match=r"Stop\.agreed"):
        stop.agreed()
        if rw.get_rank():
            rw.barrier()
        else:
            stop.agreed()


@pytest.mark.ranks(2)
def test_a_time_limit_of_one_rank_ends_all(comm: Group) -> None:
    with rw.Stop(time_limit=0.01 if rw.get_rank() == 1 else 1e9) as stop:
        while not stop.agreed():
            pass
        assert stop.reason == "rank 1 came to its time limit"


def test_the_end_of_a_job_of_slurm() -> None:
    now = time.time()
    for seconds, expected in ((3600, 3480), (600, 540), (-5, float("inf"))):
        found = stopping._slurm_limit({"SLURM_JOB_END_TIME": str(round(now + seconds))})
        assert found == pytest.approx(expected, abs=30)
    assert stopping._slurm_limit({}) == float("inf")
    with pytest.raises(rw.LauncherEnvironmentError, match="SLURM_JOB_END_TIME"):
        stopping._slurm_limit({"SLURM_JOB_END_TIME": "tomorrow"})


def test_the_end_of_a_job_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time()) + 1))
    deadline = time.monotonic() + 100
    with rw.Stop(signals=()) as stop:
        while not stop.agreed():
            assert time.monotonic() < deadline
    with rw.Stop(time_limit=float("inf")) as stop:
        assert not stop.agreed()


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Return what a handler of the program gets."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_handlers_are_restored_and_called(received: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with rw.Stop() as outer:
        with rw.Stop() as inner:
            own_signal(signal.SIGUSR1)
            assert inner.agreed()
        assert outer.agreed()
    assert received == [signal.SIGUSR1]
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    outer.close()


def test_a_handler_that_came_later_stays(received: list[int]) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with rw.Stop() as outer:
        inner = rw.Stop()
    own_signal(signal.SIGUSR1)  # the outer one is closed, and passes it on
    assert received == [signal.SIGUSR1]
    assert inner.agreed()
    assert not outer.agreed()
    inner.close()
    assert signal.getsignal(signal.SIGUSR1) == outer._handle
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_interrupt_is_noted_and_the_second_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    with rw.Stop(signals=(signal.SIGINT,)) as stop:
        own_signal(signal.SIGINT)
        monkeypatch.setattr(stopping, "_SAME_REQUEST_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            own_signal(signal.SIGINT)
        assert stop.agreed()


def in_child(number: int) -> None:
    own_signal(number)


@pytest.mark.ranks(2)
def test_forked_children_keep_what_sigterm_means(comm: Group) -> None:
    with rw.Stop() as stop:
        for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGUSR1, 0)):
            child = multiprocessing.get_context("fork").Process(target=in_child, args=(number,))
            child.start()
            child.join(100)
            assert child.exitcode == code
        assert not stop.agreed()


def test_another_thread_is_told_what_to_do() -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            with rw.Stop(signals=(), time_limit=1e-9) as stop:
                assert stop.agreed()
            rw.Stop()
        except rw.InvalidArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join()
    assert "'trainer'" in str(errors[0])
    assert "signals=()" in str(errors[0])


@each_row(
    ("arguments", "text"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"time_limit": "1:00"}, "time_limit='1:00'"),
        ({"signals": signal.SIGTERM}, "signals=<Signals.SIGTERM"),
        ({"signals": (signal.SIGTERM, signal.SIGKILL)}, "SIGKILL"),
        ({"signals": ("TERM",)}, "'TERM'"),
        ({"signals": (1000,)}, "1000"),
    ],
)
def test_odd_arguments(arguments: dict[str, Any], text: str) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(rw.InvalidArgumentError, match=text):
        rw.Stop(**arguments)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
