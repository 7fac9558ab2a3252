"""One body for every world: decorators and contexts that run code on some ranks, or in an order."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import Store

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group
from rankwise._training import exclusive_section
from tests.tables import each_row

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)


class OnlyHereError(Exception):
    """Raised on one rank."""


def test_one_rank_only_shares_its_result(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    ran = []
    for who in {0, last}:

        @rw.one_rank_only(who)
        def work(factor: int, *, who: int = who) -> dict[str, int]:
            """Work."""
            ran.append(who)
            return {"result": factor * rw.get_rank()}

        assert work(3) == {"result": 3 * who}
        assert work.__doc__ == "Work."
    assert ran == [who for who in sorted({0, last}) if who == rank]


def test_one_rank_only_without_sharing(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1

    @rw.one_rank_only(last, share=False)
    def work() -> int:
        return 5

    if rank == last:  # nobody else has to call it
        assert work() == 5
    rw.barrier()
    assert work() == (5 if rank == last else None)


def test_one_rank_only_refuses_invalid_ranks(comm: Group) -> None:
    """With and without sharing, and on all ranks: a function that never runs would not be noticed."""
    with pytest.raises(rw.InvalidArgumentError, match="parentheses"):
        rw.one_rank_only(print)  # type: ignore[call-overload]  # that is the point
    for share in (True, False):
        for rank in (-1, None, "0", True, 0.0):
            with pytest.raises(rw.InvalidArgumentError, match=f"rank={rank!r}"):
                rw.one_rank_only(rank, share=share)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(rw.InvalidArgumentError, match="rank=99"):
            rw.one_rank_only(99, share=share)(int)()
        assert rw.one_rank_only(np.int64(0), share=share)(lambda: 5)() == (5 if share or rw.get_rank() == 0 else None)  # type: ignore[call-overload]
    assert rw.all_reduce(1) == comm.size


@each_row("decorate", [rw.rank_zero_only, rw.one_rank_only(share=False)], ids=["zero", "one"], collective=True)
def test_all_methods_but_no_coroutines_and_generators(comm: Group, decorate: Any) -> None:
    class Saver:
        @decorate  # type: ignore[untyped-decorator]  # one of two
        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @classmethod
        @decorate  # type: ignore[untyped-decorator]  # one of two
        def below(cls) -> str:
            return cls.__name__

        @decorate  # type: ignore[untyped-decorator]  # one of two
        @staticmethod
        def static(value: str) -> str:
            return value

    async def later() -> None:
        pass

    def items() -> Iterator[int]:
        yield 1

    for result in (Saver.of_class(), Saver().of_class(), Saver.below(), Saver.static("Saver"), Saver().static("Saver")):
        assert result == ("Saver" if rw.get_rank() == 0 else None)
    for fn in (later, items):
        with pytest.raises(rw.InvalidArgumentError, match=f"{fn.__name__}, a coroutine or generator"):
            decorate(fn)
    with pytest.raises(rw.InvalidArgumentError, match="got a property"):
        decorate(property(int))


@each_row("decorate", [rw.rank_zero_first(), rw.in_rank_order()], ids=["first", "order"], collective=True)
def test_blocks_decorate_methods_but_no_coroutines_and_generators(comm: Group, decorate: Any) -> None:
    ran = []

    class Reader:
        @decorate  # type: ignore[untyped-decorator]  # one of two
        @classmethod
        def of_class(cls, *, number: int) -> str:
            ran.append(number)
            return cls.__name__

        async def __call__(self) -> None:
            pass

    async def later() -> None:
        pass

    def items() -> Iterator[int]:
        yield 1

    assert [Reader.of_class(number=number) for number in range(2)] == ["Reader"] * 2  # the same one again
    assert ran == [0, 1]
    for fn in (later, items, functools.partial(later), Reader()):
        with pytest.raises(rw.InvalidArgumentError, match="a coroutine or generator"):
            decorate(fn)
    for _ in range(2):  # the same one again
        with decorate:
            pass
    assert rw.all_reduce(1) == comm.size


def test_one_rank_only_is_a_context(comm: Group, tmp_path: Path) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    mark = tmp_path / "done"
    with rw.one_rank_only(last) as mine:
        assert mine is (rank == last)
        if mine:
            time.sleep(0.1)
            mark.touch()
    assert mark.exists(), "the others waited"


def test_an_error_on_the_one_rank_is_raised_on_all(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    wanted = OnlyHereError if rank == last else rw.RemoteRankError

    @rw.one_rank_only(last)
    def work() -> None:
        raise OnlyHereError("no disk")

    for _ in range(3):
        with pytest.raises(wanted, match="no disk"):
            work()
        with pytest.raises(wanted, match="no disk"), rw.one_rank_only(last) as mine:
            if mine:
                raise OnlyHereError("no disk")
    unsendable = rw.one_rank_only(last)(threading.Lock)
    with pytest.raises(rw.PayloadTypeError if rank == last else rw.RemoteRankError, match="cannot be pickled"):
        unsendable()
    with pytest.raises(rw.InvalidArgumentError, match="rank=9"):
        rw.one_rank_only(9)(int)()
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


class SeveralLines:
    def __reduce__(self) -> str:
        raise ValueError("no key 'a'\nin:\n  b")


def test_errors_of_several_lines_are_reported_by_class_and_first_line(comm: Group) -> None:
    last = comm.size - 1
    here = rw.get_rank() == last
    for call in (
        rw.one_rank_only(last)(SeveralLines().__reduce__),
        lambda: rw.all_gather(SeveralLines() if here else 0),
    ):
        with pytest.raises((ValueError, rw.PayloadTypeError) if here else rw.RemoteRankError) as raised:
            call()
        if not here:
            headline, _, rest = str(raised.value).partition("\n")
            assert re.search(r" raised .*(ValueError|PayloadTypeError): .*no key 'a'", headline)
            assert rest.rstrip().endswith("in:\n  b")


def test_an_error_of_a_waiting_rank_is_raised_there_only(comm: Group) -> None:
    if rw.get_rank() == comm.size - 1:
        with pytest.raises(OnlyHereError), rw.one_rank_only(0) as mine:
            assert mine is (comm.size == 1)
            raise OnlyHereError
    elif rw.get_rank() == 0:
        with rw.one_rank_only(0):
            pass
    else:
        with rw.one_rank_only(0):
            pass
    assert rw.all_reduce(1) == comm.size


def test_rank_zero_first_is_a_decorator_and_knows_nodes(comm: Group, tmp_path: Path) -> None:
    mark = tmp_path / "cache"

    @rw.rank_zero_first(local=True)
    def load() -> bool:
        found = mark.exists()
        mark.touch()
        return found

    assert load() is (rw.get_rank() != 0)
    assert load() is True


class _DelayedStore:
    """A connection to a store on which `set` is delayed, as by the kernel; later operations come after it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: list[threading.Thread] = []

    def set(self, key: str, value: str) -> None:
        def arrive() -> None:
            time.sleep(0.1)
            self._store.set(key, value)

        self._pending.append(threading.Thread(target=arrive))
        self._pending[-1].start()

    def __getattr__(self, name: str) -> Any:
        while self._pending:
            self._pending.pop().join()
        return getattr(self._store, name)


@pytest.mark.ranks(2, 3)
def test_the_end_of_a_section_is_stored_before_later_messages(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    board = comm_of(comm).shared_store()
    assert board is not None
    slow = _DelayedStore(board)
    monkeypatch.setattr(comm_of(comm), "shared_store", lambda: slow)
    for _ in range(2):
        with rw.in_rank_order():
            pass
        rw.barrier()
        assert rw.one_rank_only()(lambda: "done")() == "done"


def test_ranks_run_one_after_the_other(comm: Group, tmp_path: Path) -> None:
    order = tmp_path / "order"
    for _ in range(3):
        with rw.in_rank_order(), order.open("a") as file:
            file.write(f"{rw.get_rank()}\n")
        assert order.read_text().split()[-comm.size :] == [str(rank) for rank in range(comm.size)], "all are done"
        rw.barrier()

    @rw.in_rank_order()
    def work() -> int:
        return rw.get_rank()

    assert work() == rw.get_rank()


def test_an_error_in_rank_order_is_raised_on_all_ranks(comm: Group) -> None:
    rank, middle = rw.get_rank(), comm.size // 2
    entered = []
    wanted = OnlyHereError if rank == middle else rw.RemoteRankError
    with pytest.raises(wanted, match="no disk"), rw.in_rank_order():
        entered.append(rank)
        if rank == middle:
            raise OnlyHereError("no disk")
    assert entered == ([rank] if rank <= middle else [])
    with rw.one_rank_only(0) as mine:
        if mine:
            time.sleep(0.1)
    assert rw.all_reduce(1) == comm.size


def test_a_collective_inside_of_a_block_is_an_error_in_every_world(comm: Group) -> None:
    """No deadlock: neither the rank in the collective waits for the others, nor they for the end of its section."""
    group = rw.new_group(range(comm.size))
    calls: list[Callable[[], object]] = [
        lambda: rw.all_reduce(1),
        rw.barrier,
        lambda: rw.all_reduce(1, group=group),
        rw.one_rank_only(0)(int),
        rw.rank_zero_first(local=True)(int),
        rw.in_rank_order()(int),
    ]
    outers: list[Any] = [rw.one_rank_only(0), rw.rank_zero_first(), rw.rank_zero_first(local=True), rw.in_rank_order()]
    wanted = rw.CollectiveError if rw.get_rank() == 0 else rw.RemoteRankError
    for outer in outers:
        for call in calls:
            with pytest.raises(wanted, match="cannot begin inside of the block of"):
                outer(call)()
            assert rw.all_reduce(1) == comm.size, "and the next collective works"
            assert rw.all_reduce(1, group=group) == comm.size


def test_a_collective_of_a_waiting_rank_is_an_error(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    with rw.one_rank_only(0) as mine:
        if rank == last:
            with pytest.raises(rw.CollectiveError, match="cannot begin inside of the block of one_rank_only"):
                rw.all_reduce(1)
        assert mine is (rank == 0)
    with rw.rank_zero_first():
        if rank == last:
            with pytest.raises(rw.CollectiveError, match="cannot begin inside of the block of rank_zero_first"):
                rw.barrier()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_a_block_refused_because_of_another_thread_fails_on_all_ranks(comm: Group) -> None:
    rw.node_group()
    held = threading.Event(), threading.Event()

    def hold() -> None:
        guard = comm_of(comm).control.turns.block_collectives(comm_of(comm).call("another"))
        held[0].set()
        held[1].wait(60)
        guard.release()

    thread = threading.Thread(target=hold)
    if rw.get_rank() == 0:
        thread.start()
        assert held[0].wait(60)
        with pytest.raises(rw.CollectiveError, match=r"is in another at .* with the same group"):
            rw.rank_zero_first(local=True)(print)()
        held[1].set()
        thread.join(60)
    else:
        with pytest.raises(rw.RemoteRankError, match=r"rank 0 .* raised .*CollectiveError: rank_zero_first"):
            rw.rank_zero_first(local=True)(print)()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_a_long_wait_for_a_block_is_explained_once(
    comm: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner may be in a collective of torch, which waits for the others, and is not refused."""
    monkeypatch.setattr(exclusive_section, "_NOTICE_SECONDS", 0.1)
    with rw.one_rank_only() as is_owner:
        if is_owner:
            time.sleep(0.6)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == (rw.get_rank() == 1), texts
    assert all("for the block of rank 0; if that is in a collective of torch" in text for text in texts)
    assert all("use model.module" in text for text in texts)
