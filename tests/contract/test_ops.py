"""The table of operations: each one gives the same result on every route that a reduction can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.comm import INLINE_BYTES
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import OPS, Op, plan
from rankwise.testing.fakes import recording
from tests.contract.test_routes import WAYS, route
from tests.tables import each_row

# The number of int64 elements that do not fit into a frame.
LARGE = INLINE_BYTES // 8 + 1


def operand(op: Op, rank: int) -> Any:
    """Return a rank's number; sums and products of them are exact in every type."""
    return rank == 0 if op.bools_only else 2 + rank


def results(op: Op, comm: Group) -> Iterator[tuple[str, Any]]:
    """Reduce one operand of each rank in every form that takes another route."""
    number = operand(op, rw.get_rank())
    yield "a number", rw.all_reduce(number, op=op.name)
    everywhere = [rw.reduce(number, op=op.name, dst=dst) for dst in range(comm.size)]
    yield "a number on one rank", everywhere[rw.get_rank()]
    for length in (1, LARGE):
        tensor = torch.full((length,), number)
        yield f"{length} elements", rw.all_reduce(tensor, op=op.name)[-1].item()
        yield f"{length} elements of two tensors", rw.all_reduce([tensor, tensor], op=op.name)[1][-1].item()
        yield f"{length} elements scattered", rw.reduce_scatter([tensor] * comm.size, op=op.name)[-1].item()
        if not op.bools_only:
            for dtype in (torch.float16, torch.complex64) if op.absorbing is None else (torch.float16,):
                reduced = rw.all_reduce(tensor.to(dtype), op=op.name)
                assert reduced.dtype == dtype
                yield f"{length} elements of {dtype}", reduced[-1].item()


@each_row("op", OPS.values(), ids=OPS, collective=True)
@pytest.mark.ranks("serial", 1, 2, 4)
def test_every_op_gives_one_result_in_every_form(comm: Group, op: Op) -> None:
    wanted = op.reduce_numbers([operand(op, rank) for rank in range(comm.size)])
    for name, result in results(op, comm):
        assert result == wanted, name


@each_row("op", OPS.values(), ids=OPS, collective=True)
@pytest.mark.ranks(2)
def test_every_op_gives_one_result_by_every_route(comm: Group, op: Op) -> None:
    wanted = op.reduce_numbers([operand(op, rank) for rank in range(comm.size)])
    for way in WAYS:
        with route(way, comm):
            for name, result in results(op, comm):
                assert result == wanted, (way, name)


@each_row("op", OPS.values(), ids=OPS)
def test_every_op_is_in_the_recording_group(op: Op) -> None:
    number = operand(op, 0)
    wanted = op.reduce_numbers([number] * 3)
    with recording(world_size=3):
        assert rw.all_reduce(number, op=op.name) == wanted
        assert rw.all_reduce(torch.full((LARGE,), number), op=op.name)[-1].item() == wanted


@each_row("op", OPS.values(), ids=OPS)
def test_the_table_is_complete(op: Op) -> None:
    assert Op.parse(op.name) is op
    assert getattr(Op, op.name.upper()) is op
    assert plan(torch.bool, op).wire_dtype in {torch.uint8, torch.int64}


@each_row(
    ("name", "meant"),
    [("any", "or"), ("ALL", "and"), ("avg", "mean"), ("average", "mean"), ("prod", "product"), ("summ", "sum")],
)
def test_names_of_other_libraries_have_a_hint(name: str, meant: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=f"op='{name}' is none of .*; did you mean '{meant}'"):
        rw.all_reduce(1, op=name)
