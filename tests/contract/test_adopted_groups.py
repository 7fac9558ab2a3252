"""One body for every world: a process group of some ranks, made by other code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._session.adoption import adopt_subgroup
from rankwise._session.current import current_session


@pytest.mark.ranks(2, 3, 4)
def test_a_process_group_made_by_other_code_is_adopted(comm: Group) -> None:
    rank = rw.get_rank()
    members = list(range(1, comm.size))
    group = dist.new_group(members)
    if isinstance(group, dist.ProcessGroup) and rank in members:
        for _ in range(2):
            adopted = adopt_subgroup(group, current_session())
            part = Group(adopted)
            assert list(part.ranks) == members
            assert rw.all_gather(torch.full((rank * 3000,), rank), group=part)[-1].shape == (3000 * members[-1],)
            assert rw.all_reduce(rank, group=part) == sum(members)
            assert rw.broadcast(rank, src=members[-1], group=part) == members[-1], "src is a global rank"
            part.close()
    assert rw.all_reduce(1) == comm.size


@pytest.mark.ranks(3)
def test_the_first_reduction_has_the_bits_of_the_next_ones(comm: Group) -> None:
    """It has connected the ranks, and was made by another data plane than those after it."""
    group = dist.new_group(list(range(comm.size)))
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(rw.get_rank()))
    first, second = (rw.all_reduce(values, group=group) for _ in range(2))
    assert torch.equal(first, second)
    other = dist.new_group(list(range(comm.size)))
    assert torch.equal(rw.all_reduce_(values.clone(), group=other), first)
