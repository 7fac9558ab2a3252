"""Process groups that other code opens, destroys and replaces."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

import rankwise as rw
from rankwise._comm.control.registry import GroupRegistry
from rankwise._session.adoption import _adopted_registry
from rankwise._torch import fake_process_group


@pytest.fixture(autouse=True)
def excepthook() -> Iterator[None]:
    """Torch sets it when a group is opened."""
    hook = sys.excepthook
    yield
    sys.excepthook = hook


def test_what_was_found_open_is_left_open(foreign_group: dist.ProcessGroup) -> None:
    """Rule 7."""
    assert rw.all_reduce(3) == 3, "adopted without init"
    with rw.init() as session:
        assert session.group is foreign_group
        assert rw.backend() == "cpu:gloo,cuda:gloo"
    assert dist.group.WORLD is foreign_group


def test_a_group_that_came_and_went_is_noticed() -> None:
    assert rw.backend() is None
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert rw.backend() is not None
        assert rw.all_gather(1) == [1]
        dist.destroy_process_group()
        assert rw.backend() is None


def test_init_after_others_destroyed_the_group_opens_a_new_one() -> None:
    hook = sys.excepthook
    rw.init()
    dist.destroy_process_group()
    with rw.init():
        assert dist.is_initialized()
        assert rw.all_reduce(2) == 2
    assert sys.excepthook is hook


def test_a_session_whose_group_others_destroyed_says_so() -> None:
    hook = sys.excepthook
    with rw.init():
        dist.destroy_process_group()
        with pytest.raises(rw.NotJoinedError, match="destroyed by other code"):
            rw.new_group([0])
    assert sys.excepthook is hook


@pytest.mark.parametrize("call", [rw.get_rank, rw.init, rw.barrier])
def test_a_destroyed_group_is_not_kept_alive(call: Callable[[], object]) -> None:
    """Its threads would run on, and a forked child that released it would wait for them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    call()
    group = weakref.ref(cast("dist.ProcessGroup", dist.group.WORLD))
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    rw.finalize()


@pytest.mark.parametrize("kept", [True, False], ids=["the old one kept alive", "the old one gone"])
@pytest.mark.parametrize("joins", [True, False], ids=["with init", "without init"])
def test_another_group_in_the_place_of_one_counts(joins: bool, kept: bool) -> None:
    """Other ranks, in another order: the old numbers would send from the wrong rank."""
    with fake_process_group(3, 100):
        if joins:
            rw.init()
        assert (rw.get_rank(), rw.get_world_size()) == (3, 100)
        old = dist.group.WORLD if kept else None
    if joins:
        assert rw.get_rank() == 3, "who this process was, until it joins something else"
        with pytest.raises(rw.NotJoinedError, match="destroyed by other code"):
            rw.broadcast(1, src=0)
    with fake_process_group(1, 90):
        assert (rw.get_rank(), rw.get_world_size()) == (1, 90)
        with pytest.raises(
            rw.CollectiveError, match=r"group of 90 ranks could not be made|hosts of rank 0 in the store"
        ):
            rw.barrier()  # there is no other rank
    rw.finalize()
    assert rw.get_world_size() == 1
    del old


def test_another_group_in_the_place_of_a_sessions_counts() -> None:
    with rw.init():
        dist.destroy_process_group()
        assert rw.get_rank() == 0
        with fake_process_group(5, 90):
            assert (rw.get_rank(), rw.get_world_size()) == (5, 90)
        with pytest.raises(rw.NotJoinedError, match="destroyed by other code"):
            rw.barrier()


def test_another_group_in_the_place_of_a_sessions_is_left_open() -> None:
    session = rw.init()
    dist.destroy_process_group()
    with fake_process_group(5, 90):
        session.close()
        assert dist.is_initialized()
        assert rw.get_world_size() == 90


def test_an_open_group_counts_more_than_variables_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning sets WORLD_SIZE without RANK, and opens the group."""
    monkeypatch.setenv("WORLD_SIZE", "100")
    with fake_process_group(3, 100), rw.init(local_rank=1, local_world_size=2) as session:
        assert (session.rank, session.world_size, rw.get_local_rank(), rw.get_local_world_size()) == (3, 100, 1, 2)
        rw.finalize()
        with pytest.raises(rw.InvalidArgumentError, match="rank=2, but it is 3 in the process group that is open"):
            rw.init(rank=2, world_size=100)
        with pytest.raises(rw.InvalidArgumentError, match="launcher='slrum'"):
            rw.init(launcher="slrum")


def test_getters_do_not_advise_what_was_done_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the group cannot be used, as that of fake groups before torch 2.15."""
    monkeypatch.setattr(fake_pg, "FakeStore", type("UnusableStore", (dist.Store,), {}))
    with fake_process_group(3, 100), rw.init():
        for getter in (rw.get_local_rank, rw.get_num_nodes, rw.topology):
            with pytest.raises(rw.StoreError, match="the process group that other code opened cannot be used"):
                getter()


def test_variables_that_contradict_an_open_group_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with fake_process_group(1, 2):
        assert (rw.get_rank(), rw.get_world_size()) == (1, 2)
    rw.finalize()
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 1 of 2 in the process group that is open is used, "
        "but the variables give rank 7 (from RANK) of 8 (from WORLD_SIZE)"
    )


def test_closing_a_session_destroys_the_groups_that_it_made(
    foreign_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What you open you close; what you found open you leave open. Also those that nothing refers to any more."""
    monkeypatch.setattr(GroupRegistry, "moves_data_itself", lambda _: False)
    with rw.init():
        kept, _ = rw.new_group([0]), rw.new_group([0])
        assert len(dist.distributed_c10d._world.pg_map) == 3
    assert list(dist.distributed_c10d._world.pg_map) == [foreign_group]
    assert "closed" in repr(kept)
    kept.close()
    assert rw.all_reduce(1) == 1


def test_threads_that_use_an_adopted_group_at_once_count_its_adoption_once(
    foreign_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks count it once: with another count, this rank would have another prefix in their store."""
    counts: list[int] = []
    add = dist.PrefixStore.add

    def slow_add(store: dist.Store, key: str, amount: int) -> int:
        counts.append(amount)
        time.sleep(0.05)
        return add(store, key, amount)

    monkeypatch.setattr(dist.PrefixStore, "add", slow_add)
    reading, device = rw.detect({}), torch.device("cpu")
    registry = _adopted_registry(foreign_group, reading, [0], device, check=False)
    threads = [threading.Thread(target=registry.store) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1]
