"""One body for every world: the key-value store."""

from __future__ import annotations

import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3), pytest.mark.slow_with_ranks(1, 3)]


def new_key() -> str:
    """Return a key that no other test uses, the same on all ranks: stores last as long as their sessions."""
    key = rw.broadcast(f"key {secrets.token_hex(8)}")
    rw.barrier()
    return key


VALUES: list[str | bytes] = ["", b"", "text", b"\0\xff bytes", "é日本🎉", "\ud800", "?", b"?", "5", "x" * (1 << 22)]


def test_values_come_back_as_what_was_set(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    store = rw.store()
    for value in VALUES:
        key = new_key()
        store.set(f"{key}/{rank}", value)
        for other in range(size):
            found = store.get(f"{key}/{other}")
            assert (type(found), found) == (type(value), value)
        rw.barrier()
    key = new_key()
    store.set(key + "\0é 日本 / .", np.str_("of numpy"))
    assert store.get(key + "\0é 日本 / .") == "of numpy"


def test_what_is_set_is_there_for_all_after_a_barrier(comm: Group) -> None:
    """torch's `set` returns before the value is in the store."""
    for index in range(30):
        key = new_key()
        assert not rw.store().check(key)
        rw.barrier()
        if rw.get_rank() == comm.size - 1:
            rw.store().set(key, str(index))
        rw.barrier()
        assert rw.store().check(key)
        assert rw.store().get(key) == str(index)


def test_a_rank_waits_for_a_value(comm: Group) -> None:
    key, store = new_key(), rw.store()
    keys = [f"{key}/{rank}" for rank in range(comm.size)]
    rw.barrier()
    time.sleep(0.2 * rw.get_rank())
    assert store.check([]) is True
    store.wait([])
    store.set(keys[rw.get_rank()], "here")
    store.wait(iter(keys))
    store.wait(keys[-1])
    assert store.check(keys) is True
    assert store.check([*keys, key]) is False


def test_a_key_that_is_not_set_is_named(comm: Group) -> None:
    key, store = new_key(), rw.store()
    store.set(key, "here")
    waits: list[Callable[[], object]] = [
        lambda: store.get(f"{key}/missing", timeout=0.2),
        lambda: store.wait([key, f"{key}/missing"], timeout=0.2),
    ]
    for wait in waits:
        with pytest.raises(rw.StoreTimeoutError) as raised:
            wait()
        message = str(raised.value)
        assert message.startswith(f"rank {rw.get_rank()} of {comm.size} waits for '{key}/missing' in the store")
        assert message.endswith("no rank has set it within 0.2 s")
        assert isinstance(raised.value, TimeoutError)
        assert [entry.name for entry in raised.traceback][-1] in {"get", "wait"}
    rw.barrier()
    store.add(f"{key}/missing")
    with pytest.raises(rw.StoreTimeoutError, match=r"there is a counter of this name: read it with add\(key, 0\)"):
        store.get(f"{key}/missing", timeout=0.1)
    assert rw.all_reduce(1) == comm.size


def test_a_counter_gives_each_rank_another_number(comm: Group) -> None:
    key, store = new_key(), rw.store()
    store.set(key, "a text of this name, which adding would not survive in torch's store")
    assert store.add(f"{key}/zero", 0) == 0
    taken = [store.add(key) for _ in range(50)]
    everyone = sorted(number for numbers in rw.all_gather(taken) for number in numbers)
    assert everyone == list(range(1, 50 * comm.size + 1))
    last: Any = np.int64(-7)
    rw.barrier()
    assert rw.all_reduce(store.add(key, last), op="min") == 50 * comm.size - 7 * comm.size
    assert isinstance(store.get(key), str), "a counter and a value of one name are two things"


def test_one_rank_of_all_sets_an_expected_value(comm: Group) -> None:
    key, store = new_key(), rw.store()
    assert sum(rw.all_gather(store.compare_set(key, None, "same"))) == 1, "although all set the same value"
    assert sum(rw.all_gather(store.compare_set(key, "same", "same"))) >= 1
    rw.barrier()
    assert sum(rw.all_gather(store.compare_set(key, "same", f"rank {rw.get_rank()}"))) == 1
    assert store.get(key) in {f"rank {rank}" for rank in range(comm.size)}
    assert not store.compare_set(key, None, "x")
    assert not store.compare_set(key, "other", "x")
    assert not store.compare_set(f"{key}/missing", "expected", "x"), "in torch's, the result is the expected value"
    assert not store.compare_set(f"{key}/missing", "", "x"), "in torch's, this means that there is none"
    assert not store.check(f"{key}/missing")
    mine = f"{key}/{rw.get_rank()}"
    store.set(mine, b"bytes")
    assert not store.compare_set(mine, "bytes", "x")
    assert store.compare_set(mine, b"bytes", "x")
    assert store.get(mine) == "x"


def test_compare_set_makes_any_change_atomic(comm: Group) -> None:
    """Each rank appends to one text."""
    key, store = new_key(), rw.store()
    if rw.get_rank() == 0:
        store.set(key, "")
    for _ in range(20):
        while True:
            text = store.get(key)
            assert isinstance(text, str)
            if store.compare_set(key, text, text + str(rw.get_rank())):
                break
    rw.barrier()
    assert sorted(str(store.get(key))) == sorted("".join(str(rank) * 20 for rank in range(comm.size)))


def test_a_key_is_deleted_once(comm: Group) -> None:
    key, store = new_key(), rw.store()
    assert not store.delete(key)
    rw.barrier()
    if rw.get_rank() == 0:
        store.set(key, "x")
        store.add(key, 5)
    rw.barrier()
    assert sum(rw.all_gather(store.delete(key))) in range(1, comm.size + 1)
    assert not store.check(key)
    assert store.add(key, 0) == 0
    store.set(f"{key}/{rw.get_rank()}", "x")
    assert store.delete(f"{key}/{rw.get_rank()}")
    with pytest.raises(rw.StoreTimeoutError):
        store.get(f"{key}/{rw.get_rank()}", timeout=0.01)


def test_arguments_are_checked_before_anything_is_sent(comm: Group) -> None:
    """torch's server closes the connection of a rank that sends too long a key or value."""
    key, store = new_key(), rw.store()
    odd: Any = [None, 5, b"bytes", ["list"], "\ud800", "x" * 5000, "日" * 2000]
    for wrong in odd:
        for call in (
            lambda: store.set(wrong, "x"),  # noqa: B023 - called at once
            lambda: store.get(wrong, timeout=0.1),  # noqa: B023
            lambda: store.wait([wrong], timeout=0.1),  # noqa: B023
            lambda: store.check([wrong]),  # noqa: B023
            lambda: store.add(wrong),  # noqa: B023
            lambda: store.compare_set(wrong, None, "x"),  # noqa: B023
            lambda: store.delete(wrong),  # noqa: B023
        ):
            with pytest.raises(rw.InvalidArgumentError, match="key"):
                call()
    odd = [None, 5, b"bytes"]
    for wrong in odd:
        with pytest.raises(rw.InvalidArgumentError, match="neither a key nor a sequence of keys"):
            store.check(wrong)
    odd = [None, 5, 0.5, ["list"], bytearray(b"x"), "x" * ((1 << 22) + 1)]
    for wrong in odd:
        with pytest.raises(rw.InvalidArgumentError, match="value"):
            store.set(key, wrong)
        with pytest.raises(rw.InvalidArgumentError, match="desired"):
            store.compare_set(key, None, wrong)
    odd = [True, 0.5, "1", None, 2**63, -(2**70)]
    for wrong in odd:
        with pytest.raises(rw.InvalidArgumentError, match="amount"):
            store.add(key, wrong)
    odd = [0, -1, "1", True, float("nan")]
    for wrong in odd:
        with pytest.raises(rw.InvalidArgumentError, match="timeout"):
            store.get(key, timeout=wrong)
    rw.barrier()
    assert not store.check(key)


def test_threads_use_the_store_at_once(comm: Group) -> None:
    """One waits for a value that another one sets later, while a third adds, and the main thread is in collectives."""
    key, store = new_key(), rw.store()
    rank = rw.get_rank()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(store.get(f"{key}/{rank}", timeout=100))),
        threading.Thread(target=lambda: [store.add(key) for _ in range(100)]),
        threading.Thread(target=lambda: found.append(rw.store() is store)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert rw.all_reduce(1) == comm.size
    store.set(f"{key}/{rank}", "set")
    for thread in threads:
        thread.join()
    rw.barrier()
    assert sorted(map(str, found)) == ["True", "set"]
    assert store.add(key, 0) == 100 * comm.size


def test_a_wait_is_interrupted_by_a_signal(comm: Group) -> None:
    """As by Ctrl-C; torch's own wait is not."""

    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StopError

    key = new_key()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for wait in (rw.store().get, rw.store().wait):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(StopError):
                wait(key, timeout=200)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


def test_the_store_is_used_where_collectives_are_not(comm: Group) -> None:
    """It is local: on one rank alone, and inside of an exclusive section."""
    key = new_key()
    if rw.get_rank() == 0:
        rw.store().set(f"{key}/0", "zero")
    with rw.one_rank_only(comm.size - 1) as mine:
        if mine:
            rw.store().set(key, rw.store().get(f"{key}/0"))
    assert rw.store().get(key) == "zero"


def test_keys_of_users_are_apart_from_others(comm: Group) -> None:
    """Exclusive sections and connections use the same server."""
    key, store = new_key(), rw.store()
    for name in ("exclusive_section/1", "../x", "group/0", "user/value/x", key):
        store.set(f"{key}{name}", "mine")
        assert store.add(f"{key}{name}", 1) >= 1
    shared = comm_of(comm).shared_store()
    if shared is not None:
        assert not shared.check([key])
        shared.set(f"{key}/other", "not of users")
        rw.barrier()
        assert not store.check(f"{key}/other")
    with rw.rank_zero_first():
        pass


def test_a_store_is_neither_pickled_nor_used_by_a_closed_session(comm: Group) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(rw.store())
    if rw.backend() is None:
        return
    group = rw.new_group(range(comm.size))
    part = type(rw.store())(comm_of(group), timeout=5)
    assert part.add("a counter of the group") >= 1
    group.close()
    with pytest.raises(rw.NotJoinedError, match="the session of this store is closed"):
        part.set("a", "b")
    del group
    with pytest.raises(rw.NotJoinedError, match="the session of this store is closed"):
        part.check("a")
