"""Mistakes of a newcomer with collectives: what is wrong, and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankwise as rw


@pytest.mark.ranks("serial", 2)
def test_operations_by_other_names(comm: rw.Group) -> None:
    for op, meant in (("avg", "mean"), (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")):
        with pytest.raises(rw.InvalidArgumentError, match=f"did you mean '{meant}'"):
            rw.all_reduce(1.0, op=op, group=comm)  # type: ignore[arg-type]


@pytest.mark.ranks("serial", 2)
def test_a_tensor_without_contents(comm: rw.Group) -> None:
    with pytest.raises(rw.PayloadTypeError, match=r"on the device meta has no contents .* module.to_empty\(\)"):
        rw.all_reduce(torch.ones(2, device="meta"), group=comm)


@pytest.mark.ranks(2)
def test_a_group_of_which_this_rank_is_no_member(session: rw.Session) -> None:
    group = rw.new_group([0])
    if session.rank:
        with pytest.raises(rw.InvalidArgumentError, match="only members call its collectives: if group"):
            rw.all_reduce(1, group=group)
    else:
        assert rw.all_reduce(1, group=group) == 1


def test_a_call_after_the_session() -> None:
    def run() -> str:
        with rw.init("gloo"):
            rw.barrier()
        with pytest.raises(rw.NotJoinedError) as raised:
            rw.barrier()
        return str(raised.value)

    for text in rw.launch(run, nproc=2):
        assert "whose session is closed: the call comes after the block of rankwise.init(), or after finalize()" in text
