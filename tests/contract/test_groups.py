"""One body for every world: groups and barriers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.control.call import Call
from rankwise._comm.group import Group
from rankwise._environment.facts import Fact
from rankwise._session.session import state_behind
from tests.lanes import variants

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)


def test_collectives_stay_within_their_group(comm: Group) -> None:
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
def test_a_rank_within_the_group_is_passed_as_a_group_rank(comm: Group) -> None:
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


def test_a_group_rank_is_an_index(comm: Group) -> None:
    assert comm.size
    assert repr(rw.GroupRank(2)) == "GroupRank(2)"
    assert {rw.GroupRank(2)} == {rw.GroupRank(2)}
    assert rw.GroupRank(torch.tensor(1)).index == 1  # type: ignore[arg-type]  # integers of other libraries are taken
    for wrong in (-1, True, 1.0, "1", None):
        with pytest.raises(rw.InvalidArgumentError, match="GroupRank"):
            rw.GroupRank(wrong)  # type: ignore[arg-type]  # that is the point


def test_src_outside_of_the_group_is_refused(comm: Group) -> None:
    group = rw.new_group([comm.size - 1])
    if rw.get_rank() == comm.size - 1:
        with pytest.raises(rw.InvalidArgumentError, match=r"src=\d+ is not a member"):
            rw.broadcast(1, src=comm.size, group=group)
        if comm.size > 1:
            with pytest.raises(rw.InvalidArgumentError, match="src=0 is not a member"):
                rw.broadcast(1, src=0, group=group)


def test_invalid_groups_are_refused(comm: Group) -> None:
    for ranks in ([], [0, 0], [comm.size], [-1], 0, None, "01", [0.0]):
        with pytest.raises(rw.InvalidArgumentError):
            rw.new_group(ranks)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(rw.InvalidArgumentError, match="make one with"):
        rw.all_reduce(1, group=[0])  # type: ignore[call-overload]  # that is the point


def test_a_group_has_its_place_and_nothing_to_call_by_mistake(comm: Group) -> None:
    group = rw.new_group([comm.size - 1])
    is_member = rw.get_rank() == comm.size - 1
    assert [name for name in dir(group) if not name.startswith("_")] == ["backend", "close", "rank", "ranks", "size"]
    assert (group.rank, group.ranks, group.size) == (0 if is_member else None, (comm.size - 1,), 1)
    is_joined = is_member and rw.backend() is not None
    backend = dist.get_backend_config() if dist.is_initialized() else rw.backend()
    assert group.backend == (backend if is_joined else None)
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


def test_a_group_is_neither_pickled_nor_copied(comm: Group) -> None:
    group = rw.new_group([0])
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(rw.PayloadTypeError, match="belongs to its process"):
            copied(group)
    with pytest.raises(rw.PayloadTypeError, match="belongs to its process"):
        rw.all_gather({"group": group})
    assert rw.all_reduce(1) == comm.size


def test_different_groups_on_different_ranks_are_named(comm: Group) -> None:
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match=r"ranks=\[0\]\) on rank 0, new_group\(ranks=\[1\]\) on rank"):
            rw.new_group([min(rw.get_rank(), 1)])
    assert rw.new_group([0]).size == 1


def test_node_group_holds_the_ranks_of_this_host(comm: Group) -> None:
    group = rw.node_group()
    assert rw.all_gather(rw.get_rank(), group=group) == list(range(comm.size))
    if rw.backend() is not None:
        assert rw.node_group() is group, "made once"


def test_one_per_node_group_on_one_host_is_this_rank(comm: Group) -> None:
    group = rw.one_per_node_group()
    assert list(group.ranks) == [rw.get_rank()]
    assert rw.all_gather("x", group=group) == ["x"]
    with pytest.raises(
        rw.InvalidArgumentError, match=r"one_per_node_group\(\) is made once, and closed with its session"
    ):
        group.close()
    if rw.backend() is not None:
        assert rw.one_per_node_group() is group, "made once"
        assert rw.node_group() is not group


# The node of each of four ranks; nodes need not be contiguous.
NODES = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 2], [0, 1, 2, 3]]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("node_of", variants(NODES, fast=NODES[1:2]))
def test_groups_of_several_nodes_uneven_ones_included(
    session: rw.Session, node_of: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes are those of the launch environment; here all are one host."""
    rank = rw.get_rank()
    fact = Fact(node_of[rank], "the test")
    unknown = dict.fromkeys(("local_rank", "local_world_size", "num_nodes"))
    state = state_behind(session)
    monkeypatch.setattr(state, "reading", replace(state.reading, node_rank=fact, **unknown))  # type: ignore[arg-type]
    monkeypatch.setattr(state, "node_groups", {})
    node = [other for other in range(4) if node_of[other] == node_of[rank]]
    position = node.index(rank)
    wanted = []
    for number in dict.fromkeys(node_of):
        there = [other for other in range(4) if node_of[other] == number]
        wanted += there[position : position + 1]
    groups = rw.node_group(), rw.one_per_node_group()
    assert [list(group.ranks) for group in groups] == [node, wanted]
    for group in groups:
        assert rw.all_gather(rank, group=group) == list(group.ranks)
    total = rw.all_reduce(rank, group=groups[0])
    if position == 0:
        assert rw.all_reduce(total, group=groups[1]) == 6, "each node's sum, once"
    assert rw.one_per_node_group() is groups[1], "made once"
    for group in groups:
        comm_of(group).close()


class CallWithoutGather(Call):
    """A call that fails on its rank."""

    all_gather = None  # type: ignore[assignment]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["node_group", "one_per_node_group"])
def test_a_failure_or_another_call_on_one_rank_is_raised_on_all(
    session: rw.Session, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size = rw.get_rank(), rw.get_world_size()
    make = getattr(rw, name)
    state = state_behind(session)
    monkeypatch.setattr(state, "node_groups", {})
    with pytest.raises(rw.MismatchError, match=rf"{name}\(\)"):
        rw.barrier() if rank == 0 else make()
    with monkeypatch.context() as patched:
        if rank == 0:
            control = state.comm.control  # of this rank alone: ranks may be threads
            patched.setattr(state.comm, "call", lambda name: CallWithoutGather(control, name))
        with pytest.raises(TypeError if rank == 0 else rw.RemoteRankError, match="not callable"):
            make()
    group = make()
    assert rw.all_gather(rank, group=group) == (list(range(size)) if name == "node_group" else [rank])
    comm_of(group).close()


def test_barrier_waits_for_all(comm: Group, tmp_path: Path) -> None:

    mark = tmp_path / str(rw.get_rank())
    mark.touch()
    rw.barrier()
    assert len(list(mark.parent.iterdir())) == comm.size
    rw.barrier()
