"""One body for every world: groups and barriers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._comm.group import Comm

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)


def test_collectives_stay_within_their_group(comm: Comm) -> None:
    rank = rw.get_rank()
    members = [other for other in range(comm.size) if other % 2 == (comm.size - 1) % 2]
    group = rw.new_group(members)
    if rank in members:
        assert rw.all_gather(rank, group=group) == members
        assert rw.all_reduce(torch.tensor(rank), group=group).item() == sum(members)
        assert rw.broadcast(rank, src=members[-1], group=group) == members[-1], "src is a global rank"
        assert rw.gather(rank, dst=members[-1], group=group) == (members if rank == members[-1] else None)
        assert rw.reduce(rank, dst=members[-1], group=group) == (sum(members) if rank == members[-1] else None)
        assert rw.all_to_all([(rank, other) for other in members], group=group) == [(other, rank) for other in members]
        assert rw.scatter(members if rank == members[0] else None, src=members[0], group=group) == rank
        assert rw.reduce_scatter([torch.tensor(1)] * len(members), group=group).item() == len(members)
        rw.barrier(group=group)
    else:
        for talk in (rw.all_gather, rw.all_reduce, rw.broadcast, rw.gather, rw.reduce):
            with pytest.raises(rw.InvalidArgumentError, match="not a member"):
                talk(1, group=group)
        with pytest.raises(rw.InvalidArgumentError, match="not a member"):
            rw.all_to_all([1], group=group)
        with pytest.raises(rw.InvalidArgumentError, match="not a member"):
            rw.barrier(group=group)


@pytest.mark.usefixtures("torch_random")
def test_a_rank_within_the_group_is_passed_as_a_group_rank(comm: Comm) -> None:
    rank, members = rw.get_rank(), list(range(comm.size // 2, comm.size))
    group = rw.new_group(members)
    if rank in members:
        for index, member in enumerate(members):
            src = rw.GroupRank(index)
            assert rw.broadcast(rank, src=src, group=group) == member
            assert rw.gather(rank, dst=src, group=group) == (members if rank == member else None)
            assert rw.scatter(members if rank == member else None, src=src, group=group) == rank
            assert rw.broadcast(rank, src=src if rank % 2 else member, group=group) == member, "some pass the other"
            model = torch.nn.Linear(1, 1)
            torch.nn.init.constant_(model.weight, rank)
            rw.sync_params(model, src=src, group=group)
            assert model.weight.item() == member
        size = len(members)
        with pytest.raises(
            rw.InvalidArgumentError, match=rf"src=GroupRank\({size}\) is not .* the group has {size} ranks"
        ):
            rw.broadcast(rank, src=rw.GroupRank(size), group=group)
        wanted = rw.InvalidArgumentError if rank == members[0] else rw.RemoteRankError
        with pytest.raises(wanted, match=rf"dst=GroupRank\(9\) is not .* the group has {size} ranks"):
            rw.gather(rank, dst=rw.GroupRank(9 if rank == members[0] else 0), group=group)
        if size > 1:
            with pytest.raises(rw.MismatchError, match="src="):
                rw.broadcast(rank, src=rw.GroupRank(int(rank == members[0])), group=group)
    assert rw.broadcast(rank, src=rw.GroupRank(comm.size - 1)) == comm.size - 1


def test_a_group_rank_is_an_index(comm: Comm) -> None:
    assert comm.size
    assert repr(rw.GroupRank(2)) == "GroupRank(2)"
    assert {rw.GroupRank(2)} == {rw.GroupRank(2)}
    assert rw.GroupRank(torch.tensor(1)).index == 1  # type: ignore[arg-type]  # integers of other libraries are taken
    for wrong in (-1, True, 1.0, "1", None):
        with pytest.raises(rw.InvalidArgumentError, match="GroupRank"):
            rw.GroupRank(wrong)  # type: ignore[arg-type]  # that is the point


def test_src_outside_of_the_group_is_refused(comm: Comm) -> None:
    group = rw.new_group([comm.size - 1])
    if rw.get_rank() == comm.size - 1:
        with pytest.raises(rw.InvalidArgumentError, match=r"src=\d+ is not a member"):
            rw.broadcast(1, src=comm.size, group=group)
        if comm.size > 1:
            with pytest.raises(rw.InvalidArgumentError, match="src=0 is not a member"):
                rw.broadcast(1, src=0, group=group)


def test_invalid_groups_are_refused(comm: Comm) -> None:
    for ranks in ([], [0, 0], [comm.size], [-1], 0, None, "01", [0.0]):
        with pytest.raises(rw.InvalidArgumentError):
            rw.new_group(ranks)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(rw.InvalidArgumentError, match="make one with"):
        rw.all_reduce(1, group=[0])  # type: ignore[call-overload]  # that is the point


def test_a_group_has_its_place_and_nothing_to_call_by_mistake(comm: Comm) -> None:
    group = rw.new_group([comm.size - 1])
    is_member = rw.get_rank() == comm.size - 1
    assert [name for name in dir(group) if not name.startswith("_")] == ["backend", "close", "rank", "ranks", "size"]
    assert (group.rank, group.ranks, group.size) == (0 if is_member else None, (comm.size - 1,), 1)
    is_joined = is_member and rw.backend() is not None
    assert group.backend == (dist.get_backend_config() if is_joined else None)
    assert group == group, "and no other is: groups of the same ranks have calls of their own"  # noqa: PLR0124
    assert group != rw.new_group([comm.size - 1])
    for name in ("all_reduce", "broadcast", "barrier", "sync_grads"):
        with pytest.raises(AttributeError, match=rf"call rankwise\.{name}\(\.\.\., group=group\)"):
            getattr(group, name)(torch.ones(1), "nonsense")
    with pytest.raises(AttributeError, match=r"no attribute 'device'$"):
        group.device  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        group.size = 3  # type: ignore[misc]  # that is the point
    with pytest.raises(rw.InvalidArgumentError, match=r"groups are made by rankwise\.new_group"):
        rw.Group([0])  # type: ignore[arg-type]  # that is the point
    assert rw.Comm is rw.Group


def test_a_group_is_neither_pickled_nor_copied(comm: Comm) -> None:
    group = rw.new_group([0])
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(rw.PayloadTypeError, match="belongs to its process"):
            copied(group)
    with pytest.raises(rw.PayloadTypeError, match="belongs to its process"):
        rw.all_gather({"group": group})
    assert rw.all_reduce(1) == comm.size


def test_different_groups_on_different_ranks_are_named(comm: Comm) -> None:
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match=r"ranks=\[0\]\) on rank 0, new_group\(ranks=\[1\]\) on rank"):
            rw.new_group([min(rw.get_rank(), 1)])
    assert rw.new_group([0]).size == 1


def test_node_group_holds_the_ranks_of_this_host(comm: Comm) -> None:
    group = rw.node_group()
    assert rw.all_gather(rw.get_rank(), group=group) == list(range(comm.size))
    if rw.backend() is not None:
        assert rw.node_group() is group, "made once"


def test_barrier_waits_for_all(comm: Comm, tmp_path: Path) -> None:

    mark = tmp_path / str(rw.get_rank())
    mark.touch()
    rw.barrier()
    assert len(list(mark.parent.iterdir())) == comm.size
    rw.barrier()
