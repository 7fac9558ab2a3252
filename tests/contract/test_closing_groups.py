"""One body for every world: groups that are closed, and their resources."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.registry import GroupRegistry
from rankwise._comm.data.torch_backend import TorchPlane
from rankwise._comm.group import Group

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)


class OnlyHereError(Exception):
    """Raised on one rank."""


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process, after a garbage collection."""
    gc.collect()
    return _counts()


def settled() -> tuple[int, int]:
    """Return `held()` once it stays the same: the session of an earlier test may have threads that are about to end."""
    found, unchanged = held(), 0
    while unchanged < 20:
        time.sleep(0.01)
        now = _counts()
        found, unchanged = now, unchanged + 1 if now == found else 0
    return found


def _counts() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def open_files() -> list[str]:
    """Return what the descriptors of this process refer to."""
    return [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def assert_about(before: tuple[int, int]) -> None:
    """Five groups may not add a thread, nor more than one descriptor: the second area of the memory of the host."""
    descriptors, threads = held()
    assert threads == before[1]
    assert abs(descriptors - before[0]) <= 1


@pytest.mark.slow_with_ranks("serial", 1, 3, 4)
def test_a_closed_group_releases_its_resources(comm: Group) -> None:
    """The connections are those of the session, which the first transfer makes."""
    with rw.new_group(range(comm.size)) as group:
        rw.all_reduce(torch.ones(3000), group=group)
    before = settled()
    for _ in range(3):
        groups = [rw.new_group(range(comm.size)) for _ in range(5)]
        for group in groups:
            assert rw.all_reduce(torch.ones(3000), group=group)[0] == comm.size
        assert_about(before)
        for group in reversed(groups):
            group.close()
        assert_about(before)
    assert rw.all_reduce(1) == comm.size


@pytest.mark.slow
@pytest.mark.slow_with_ranks("serial", 1, 3, 4)
def test_300_groups_take_few_descriptors_and_leave_none(comm: Group) -> None:
    rw.new_group(range(comm.size)).close()
    before = settled()
    groups = [rw.new_group(range(comm.size)) for _ in range(300)]
    # One more is the second area of the memory of the host.
    assert before <= settled() <= (before[0] + 1, before[1]), open_files()
    assert rw.all_reduce(1, group=groups[-1]) == comm.size
    for group in groups:
        group.close()
    assert settled() == before, open_files()


def test_a_closed_group_cannot_be_used_and_can_be_closed_again(comm: Group) -> None:
    members = [0, comm.size - 1] if comm.size > 1 else [0]
    with rw.new_group(members) as group:
        assert rw.get_rank() not in members or rw.all_reduce(1, group=group) == len(members)
    assert "closed" in repr(group)
    for _ in range(2):
        with pytest.raises(rw.InvalidArgumentError, match="this group is closed"):
            rw.all_reduce(1, group=group)
        with pytest.raises(rw.InvalidArgumentError, match="this group is closed"):
            rw.barrier(group=group)
        group.close()
    assert list(group.ranks) == members
    assert rw.all_gather(rw.get_rank()) == list(range(comm.size))


def test_unreferenced_groups_are_closed_by_the_next_new_group(comm: Group) -> None:
    rw.new_group([0]).close()
    before = settled()
    for _ in range(5):
        rw.all_reduce(1, group=rw.new_group(range(comm.size)))
    gc.collect()
    rw.new_group([0]).close()  # which closes them
    assert held() == before


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
def test_unreferenced_groups_are_closed_with_the_pairs_that_have_communicated_alone(comm: Group) -> None:
    def send() -> None:
        group = rw.new_group(range(comm.size))
        if group.rank == 0:
            rw.send("value", dst=1, group=group)
        elif group.rank == 1:
            assert rw.recv(src=0, group=group) == "value"

    gc.collect()  # of earlier tests
    rw.new_group([0]).close()
    before = settled()
    for _ in range(5):
        send()
    gc.collect()
    rw.new_group([0]).close()  # which closes them
    assert held() == before


def test_closing_on_one_rank_only_is_a_mismatch_on_both(comm: Group) -> None:
    group = rw.new_group(range(comm.size))
    if comm.size == 1:
        group.close()
        return
    for call in (lambda: rw.all_reduce(1, group=group), lambda: rw.all_gather(torch.ones(3000), group=group)):
        with pytest.raises(rw.MismatchError, match=r"close\(\)"):
            if rw.get_rank() == 0:
                group.close()
            else:
                call()
        assert "closed" not in repr(group)
        assert rw.all_reduce(1, group=group) == comm.size, "it stays open"
    group.close()


def test_an_error_in_the_block_closes_the_group_without_waiting(comm: Group) -> None:
    rank, last = rw.get_rank(), comm.size - 1
    group = rw.new_group(range(comm.size))
    if rank == last:
        with pytest.raises(OnlyHereError), group:
            raise OnlyHereError
    else:
        with pytest.raises(rw.CollectiveError, match=f"rank {last} left the group with OnlyHereError"), group:
            rw.all_reduce(torch.ones(3000), group=group)
    assert "closed" in repr(group)
    assert rw.all_reduce(1) == comm.size
    group = rw.new_group(range(comm.size))
    if rank == last:
        with suppress(OnlyHereError), group:
            raise OnlyHereError
    else:
        with pytest.raises(rw.CollectiveError, match=f"rank {last} left the group"):
            group.close()
    assert "closed" in repr(group), "there is nobody left to agree"
    assert rw.all_reduce(1) == comm.size


def test_groups_of_the_session_cannot_be_closed_by_users(comm: Group) -> None:
    node = rw.node_group()
    with pytest.raises(rw.InvalidArgumentError, match="finalize"):
        node.close()
    with pytest.raises(rw.InvalidArgumentError, match="finalize"), ExitStack() as stack:
        stack.enter_context(node)
    assert rw.all_reduce(1, group=node) == comm.size


def test_a_group_in_use_by_another_thread_stays_open(comm: Group) -> None:
    group = rw.new_group(range(comm.size))
    if comm.size > 1:
        if rw.get_rank() == 0:
            waiting = threading.Thread(target=lambda: rw.barrier(group=group))
            waiting.start()
            while not comm_of(group).control.turns._call:
                threading.Event().wait(0.001)
            with pytest.raises(rw.CollectiveError, match="thread"):
                group.close()
            rw.barrier()
            waiting.join()
        else:
            rw.barrier()
            rw.barrier(group=group)
    group.close()


@pytest.mark.ranks(2, 3)
def test_a_process_group_that_other_code_destroyed(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupRegistry, "moves_data_itself", lambda _: False)
    group = rw.new_group(range(comm.size))
    plane = comm_of(group).planes.planes[-1]
    assert isinstance(plane, TorchPlane)
    dist.destroy_process_group(plane.group)
    rw.barrier(group=group)
    group.close()
    made = len(dist.distributed_c10d._world.pg_map)
    rw.new_group(range(comm.size)).close()
    assert len(dist.distributed_c10d._world.pg_map) == made
