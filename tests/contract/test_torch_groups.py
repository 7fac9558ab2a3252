"""One body for every world: process groups and device meshes of torch as the argument `group`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group
from rankwise._session.current import current_session
from tests.tables import each_row


def check_collectives(group: Any, members: list[int]) -> None:
    """Call each kind of collective over a group, on its members."""
    rank, first, last = rw.get_rank(), members[0], members[-1]
    for _ in range(2):
        assert rw.all_gather(rank, group=group) == members
        assert rw.all_reduce(rank, group=group) == sum(members)
        assert rw.all_reduce(torch.full((3000,), rank), group=group)[-1] == sum(members)
        assert rw.all_gather_cat(torch.tensor([rank]), group=group).tolist() == members
        assert rw.broadcast({"from": rank}, src=last, group=group) == {"from": last}, "src is a global rank"
        assert rw.gather(rank, dst=first, group=group) == (members if rank == first else None)
        assert rw.scatter(members if rank == last else None, src=last, group=group) == rank
        assert rw.reduce_scatter([torch.tensor(1.0)] * len(members), group=group) == len(members)
        rw.barrier(group=group)
        model = torch.nn.Linear(1, 1)
        rw.sync_params(model, src=last, group=group)
        model(torch.full((1, 1), float(rank))).sum().backward()
        rw.sync_grads(model, group=group)
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx(sum(members) / len(members))


@pytest.mark.usefixtures("torch_random")
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.slow_with_ranks(1)
def test_a_process_group_of_torch_is_a_group(comm: Group) -> None:
    rank, members = rw.get_rank(), list(range(comm.size // 2, comm.size))
    group = dist.new_group(members)
    if rank in members:
        check_collectives(group, members)
        assert comm_of(group) is comm_of(group), "it is adopted once"
    else:
        with pytest.raises(rw.InvalidArgumentError, match="this rank is not a member"):
            rw.all_reduce(1, group=group)
    check_collectives(dist.group.WORLD, list(range(comm.size)))
    assert comm_of(dist.group.WORLD) is current_session().comm
    with rw.new_group(members) as ours:
        assert rank not in members or rw.all_reduce(1, group=ours) == len(members)


@pytest.mark.ranks(2, 3)
def test_a_destroyed_process_group_is_an_error(comm: Group) -> None:
    rank = rw.get_rank()
    group: Any = dist.new_group(list(range(comm.size)))
    assert rw.all_reduce(1, group=group) == comm.size
    rw.barrier()
    if rank == 0:
        dist.destroy_process_group(group)
        for _ in range(2):
            with pytest.raises(rw.NotJoinedError, match="was destroyed by"):
                rw.all_reduce(1, group=group)
    else:
        with pytest.raises(rw.CollectiveError, match="rank 0 destroyed the process group"):
            rw.all_reduce(1, group=group)
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_process_groups_that_were_destroyed_are_let_go(comm: Group) -> None:
    adopted = current_session().adopted
    for _ in range(3):
        group: Any = dist.new_group(list(range(comm.size)))
        assert rw.all_reduce(1, group=group) == comm.size
        rw.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert [reference() for reference in adopted] == [None], "only torch and its users have referred to it"


@pytest.mark.ranks(2)
def test_errors_in_a_process_group_are_raised_on_its_members(comm: Group) -> None:
    rank = rw.get_rank()
    group: Any = dist.new_group([0, 1])
    for odd in range(comm.size):
        with pytest.raises(rw.PayloadTypeError if rank == odd else rw.RemoteRankError, match="generator"):
            rw.all_gather((one for one in [1]) if rank == odd else 1, group=group)
        with pytest.raises(rw.MismatchError, match="barrier"):
            rw.barrier(group=group) if rank == odd else rw.all_reduce(1, group=group)
        for late in (False, True):  # one rank comes after the others have given up
            if (rank == odd) is late:
                with pytest.raises(rw.CollectiveTimeoutError, match=f"Missing: rank {odd}"):
                    rw.barrier(timeout=0.3, group=group)
            rw.barrier()
        assert rw.all_reduce(1, group=group) == comm.size


@pytest.mark.ranks("serial", 2)
@each_row("wrong", [[0], 0, "tp", dist.ProcessGroup, object(), -100], collective=True)
def test_other_values_are_refused(comm: Group, wrong: Any) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=r"make one with rankwise\.new_group|not a member"):
        rw.all_reduce(1, group=wrong)
    assert rw.all_reduce(1) == comm.size


@pytest.mark.usefixtures("torch_random")
@pytest.mark.ranks(4)
def test_a_dimension_of_a_mesh_is_a_group(comm: Group) -> None:
    rank = rw.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_collectives(mesh["tp"], [rank // 2 * 2, rank // 2 * 2 + 1])
    check_collectives(mesh["dp"], [rank % 2, rank % 2 + 2])
    check_collectives(mesh, [0, 1, 2, 3])
    check_collectives(mesh.get_group("dp"), [rank % 2, rank % 2 + 2])
    assert comm_of(mesh["tp"]) is comm_of(mesh["tp"])
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("one", "dp", "tp"))
    check_collectives(cube["one"], [rank])
    with pytest.raises(rw.InvalidArgumentError, match=r"2 dimensions, and no process group.*mesh\[\"tp\"\]"):
        rw.all_reduce(1, group=cube["one", "tp"])
    check_collectives(cube["one", "tp"]._flatten("both"), [rank // 2 * 2, rank // 2 * 2 + 1])
    check_collectives(cube["one", "tp"], [rank // 2 * 2, rank // 2 * 2 + 1])
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_a_mesh_of_some_ranks(comm: Group) -> None:
    last = comm.size - 1
    mesh = DeviceMesh("cpu", [last])
    if rw.get_rank() == last:
        assert rw.all_gather(last, group=mesh) == [last]
    else:
        with pytest.raises(rw.InvalidArgumentError, match=r"this rank is not a member of group=DeviceMesh"):
            rw.all_gather(last, group=mesh)
    backwards = DeviceMesh("cpu", list(reversed(range(comm.size))))
    assert rw.all_gather(rw.get_rank(), group=backwards) == dist.get_process_group_ranks(backwards.get_group())
    own = DeviceMesh("cpu", list(range(comm.size)), _init_backend=False, _rank=rw.get_rank())
    with pytest.raises(rw.InvalidArgumentError, match="has no process group"):
        rw.all_reduce(1, group=own)
    with pytest.raises(rw.InvalidArgumentError, match="has no process group"):
        rw.all_reduce(1, group=DeviceMesh("xla", list(range(comm.size))))
    assert rw.all_reduce(1) == comm.size
