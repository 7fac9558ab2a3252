"""One body for every world: reductions. Expectations are computed from the size of the world."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from tests.tables import each_row

pytestmark = pytest.mark.ranks("serial", 1, 2, 3, 4)

OPS = ["sum", "mean", "product", "min", "max"]
NUMERIC = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def expected(values: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(values)
    if op == "mean":
        floats = stacked.dtype.is_floating_point
        return stacked.double().mean(dim=0).to(stacked.dtype if floats else torch.float64)
    reduced = {
        "sum": stacked.sum(dim=0),
        "product": stacked.prod(dim=0),
        "min": stacked.amin(dim=0),
        "max": stacked.amax(dim=0),
    }
    return reduced[op].to(stacked.dtype)


@each_row("op", OPS, collective=True)
def test_all_reduce_of_tensors_keeps_type_and_shape(comm: Group, op: str) -> None:
    rank = rw.get_rank()
    for dtype in NUMERIC:
        values = [torch.tensor([[1 + r, 3], [2, 4 - r]]).to(dtype) for r in range(comm.size)]
        before = values[rank].clone()
        reduced = rw.all_reduce(values[rank], op=op)
        wanted = expected(values, op)
        assert reduced.dtype == wanted.dtype
        assert torch.equal(reduced, wanted), dtype
        assert torch.equal(values[rank], before), "the input is the caller's"
        reduced.zero_()
        assert torch.equal(values[rank], before), "the result is new, alone too"


def test_all_reduce_of_bool_tensors(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    flags = torch.tensor([True, rank == 0, False])
    assert rw.all_reduce(flags, op="and").tolist() == [True, size == 1, False]
    assert rw.all_reduce(flags, op="or").tolist() == [True, True, False]
    assert rw.all_reduce(flags, op="min").dtype == torch.bool
    counted = rw.all_reduce(flags)
    assert (counted.dtype, counted.tolist()) == (torch.int64, [size, 1, 0])
    assert rw.all_reduce(flags, op="mean").tolist() == [1.0, 1 / size, 0.0]


def test_all_reduce_of_complex_tensors(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    value = torch.tensor([1 + 1j, complex(rank)])
    assert rw.all_reduce(value).tolist() == [size * (1 + 1j), complex(sum(range(size)))]
    product = rw.all_reduce(value, op="product")
    assert product[0].item() == pytest.approx((1 + 1j) ** size)


def test_all_reduce_takes_any_dense_layout(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    grid = torch.arange(6.0).reshape(2, 3) + rank
    total = sum(range(size))
    for value in (grid.t(), grid[:, ::2], grid[0, 0], torch.empty(0), torch.empty(0, 3), grid.expand(2, 2, 3)):
        reduced = rw.all_reduce(value)
        assert reduced.shape == value.shape
        assert torch.equal(reduced, (value - rank) * size + total)


def test_all_reduce_is_detached(comm: Group) -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not rw.all_reduce(weight * 2).requires_grad
    assert not rw.all_reduce(torch.nn.Parameter(torch.ones(2))).requires_grad


def test_mean_of_half_precision_does_not_overflow(comm: Group) -> None:
    assert rw.all_reduce(torch.tensor([60000.0], dtype=torch.float16), op="mean").item() == 60000.0


def test_int64_survives_exactly(comm: Group) -> None:
    large = 2**53 + 1
    assert rw.all_reduce(torch.tensor(large), op="max").item() == large
    assert rw.all_reduce(torch.tensor(large)).item() == large * comm.size


def test_all_reduce_of_numbers_is_as_in_python(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    assert rw.all_reduce(rank) == sum(range(size))
    assert rw.all_reduce(2**80 + rank, op="max") == 2**80 + size - 1
    mean = rw.all_reduce(rank, op="mean")
    assert (type(mean), mean) == (float, (size - 1) / 2)
    assert rw.all_reduce(0.1, op="product") == math.prod([0.1] * size)
    assert rw.all_reduce(1j) == 1j * size
    assert rw.all_reduce(0.5 if rank else 1) == 1 + 0.5 * (size - 1), "numbers need not be of one type"


def test_all_reduce_of_bools(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    assert rw.all_reduce(rank == 0, op="or") is True
    assert rw.all_reduce(rank == 0, op="and") is (size == 1)
    assert rw.all_reduce(True) == size
    assert rw.all_reduce(True, op="min") is True


def test_not_a_number_wins(comm: Group) -> None:
    assert math.isnan(rw.all_reduce(math.nan if rw.get_rank() == comm.size - 1 else 1.0, op="min"))
    assert math.isnan(rw.all_reduce(math.nan if rw.get_rank() == 0 else 1.0, op="max"))


@each_row("op", ["sun", "SUM", "", "avg"], collective=True)
def test_an_unknown_op_is_refused_in_every_world(comm: Group, op: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="is none of 'sum', 'mean'"):
        rw.all_reduce(torch.ones(1), op=op)
    with pytest.raises(rw.InvalidArgumentError):
        rw.all_reduce(1, op=op)


def test_values_that_cannot_be_reduced_are_refused_in_every_world(comm: Group) -> None:
    with pytest.raises(rw.PayloadTypeError, match="for bools"):
        rw.all_reduce(torch.ones(1), op="and")
    with pytest.raises(rw.PayloadTypeError, match="for bools"):
        rw.all_reduce(1, op="or")
    with pytest.raises(rw.PayloadTypeError, match="no order"):
        rw.all_reduce(torch.ones(1, dtype=torch.complex64), op="min")
    with pytest.raises(rw.PayloadTypeError, match="no order"):
        rw.all_reduce(1j, op="max")
    with pytest.raises(rw.PayloadTypeError, match="dense"):
        rw.all_reduce(torch.ones(2, 2).to_sparse())
    with pytest.raises(rw.PayloadTypeError, match="takes tensors, numbers, arrays and containers of them, got a str"):
        rw.all_reduce("text")


def test_a_number_that_cannot_be_reduced_is_refused_on_every_rank(comm: Group) -> None:
    """Rule 11."""
    rank, last = rw.get_rank(), comm.size - 1
    wanted = rw.PayloadTypeError if rank == last else rw.RemoteRankError
    value: Any = "text" if rank == last else 2
    with pytest.raises(wanted, match="takes tensors, numbers, arrays and containers"):
        rw.all_reduce(value)
    with pytest.raises(wanted, match="for bools"):
        rw.all_reduce(2 if rank == last else True, op="and")
    assert rw.all_reduce(1) == comm.size, "and the next collective works"


def test_numpy_scalars_are_python_numbers(comm: Group) -> None:
    small: Any = np.int8(100)
    flag: Any = np.bool_(True)
    single: Any = np.float32(0.5)
    assert rw.all_reduce(small) == 100 * comm.size
    assert rw.all_reduce(flag, op="and") is True
    assert rw.all_reduce(single, op="mean") == 0.5


def bits(value: Any) -> Any:
    """Return a value with the bytes of its tensors and arrays in their place."""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(bits, value))
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.flatten().tolist()
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else (type(value), value)


@each_row("op", OPS, collective=True)
def test_reduce_gives_one_rank_the_result_of_all_reduce(comm: Group, op: str) -> None:
    """Bit for bit, of floats whose sum depends on the order, in and beyond frames."""
    rank, last = rw.get_rank(), comm.size - 1
    generator = torch.Generator().manual_seed(rank)
    for length in (1, 300, 20_000):
        tensor = torch.empty(length).copy_(torch.randn(length, generator=generator, device="cpu")) * 1e3
        values: list[Any] = [
            tensor,
            tensor.cpu().numpy(),
            {"a": [tensor, tensor.half(), rank / 7], "b": (torch.tensor(rank), 2**70 + rank, None)},
            rank / 3,
        ]
        for value in values:
            wanted = bits(rw.all_reduce(value, op=op))
            for dst in {0, last}:
                before = bits(value)
                found = rw.reduce(value, op, dst=dst)
                assert bits(value) == before, "the input is the caller's"
                assert found is None if rank != dst else bits(found) == wanted


def test_reduce_of_bools_and_of_complex_numbers(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    flags = rw.reduce(torch.tensor([True, rank == 0]), op="and")
    total = rw.reduce(torch.full((3000,), 1 + 1j, dtype=torch.complex64))
    wrong = rw.reduce(rank == 0, op="or", dst=size - 1)
    assert flags is None if rank else flags is not None and flags.tolist() == [True, size == 1]
    assert total is None if rank else total is not None and total[-1].item() == size * (1 + 1j)
    assert wrong is (True if rank == size - 1 else None)


def test_reduce_refuses_on_every_rank(comm: Group) -> None:
    """Also where only the rank that gets the result would see that there is none."""
    rank, size = rw.get_rank(), comm.size
    wrong: list[Any] = [-1, size, True, 0.0, None]
    for dst in wrong:
        with pytest.raises(rw.InvalidArgumentError, match="dst="):
            rw.reduce(1, dst=dst)
    with pytest.raises(rw.PayloadTypeError, match="takes tensors, numbers, arrays and containers of them, got a str"):
        rw.reduce("text")
    mixed: Any = 10**400 if rank == 0 else 0.5
    if size > 1:
        with pytest.raises(rw.PayloadTypeError, match="beyond the range of floats"):
            rw.reduce(mixed)
    assert rw.reduce(1) == (None if rank else size), "and the next collective works"


def test_reduce_scatter_gives_each_rank_its_part(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    values = [torch.tensor([float(rank + place), 1.0]) for place in range(size)]
    assert rw.reduce_scatter(values).tolist() == [sum(range(size)) + size * rank, size]
    assert rw.reduce_scatter(values, op="max").tolist() == [size - 1 + rank, 1.0]
    assert rw.reduce_scatter([torch.tensor(rank)] * size, op="mean").item() == (size - 1) / 2


def test_reduce_scatter_takes_parts_of_different_shapes(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    part = rw.reduce_scatter([torch.ones(place, 2) for place in range(size)])
    assert part.shape == (rank, 2)
    assert (part == size).all()


def test_reduce_scatter_refuses_other_values_than_sequences_of_tensors(comm: Group) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="one tensor for each"):
        rw.reduce_scatter([torch.ones(1)] * (comm.size + 1))
    with pytest.raises(rw.PayloadTypeError):
        rw.reduce_scatter(torch.ones(comm.size))  # type: ignore[call-overload]  # that is the point
    if comm.size > 1:
        with pytest.raises(rw.PayloadTypeError, match="one dtype"):
            rw.reduce_scatter([torch.ones(1), *[torch.ones(1).double()] * (comm.size - 1)])


def test_the_mean_of_integers_does_not_overflow(comm: Group) -> None:
    """As a single tensor, small or large, in containers, among numbers, and scattered; compared with Python's."""
    rank, size = rw.get_rank(), comm.size
    generator = random.Random(0)  # noqa: S311 - the same on all ranks
    largest = 2**63 - 1
    edges = [
        0,
        1,
        -1,
        7,
        -7,
        2**31,
        2**32 - 1,
        -(2**32),
        2**53,
        -(2**53) - 1,
        largest,
        -largest - 1,
        1_700_000_000 * 10**9,
    ]
    rows = [[generator.choice(edges) + generator.randrange(-3, 4) for _ in range(700)] for _ in range(size)]
    rows = [[min(max(value, -largest - 1), largest) for value in row] for row in rows]
    wanted = [sum(column) / size for column in zip(*rows, strict=True)]
    for length in (13, 700):
        value = torch.tensor(rows[rank][:length])
        for mean in (
            rw.all_reduce(value, op="mean"),
            rw.all_reduce([value, value.clone()], op="mean")[1],
            rw.all_reduce(value.reshape(1, -1, 1), op="mean").flatten(),
            rw.reduce_scatter([value] * size, op="mean"),
        ):
            assert mean.dtype == torch.float64
            for ours, exact, column in zip(mean.tolist(), wanted, zip(*rows, strict=True), strict=False):
                assert abs(ours - exact) <= math.ulp(exact) * (abs(sum(column)) >= 2**53), column
    assert rw.all_reduce(torch.tensor(largest), op="mean").item() == 2**63
    assert rw.all_reduce(torch.empty(0, 3, dtype=torch.int64), op="mean").shape == (0, 3)
    numbers = rw.all_reduce([2**70 + rank, rows[rank][0]], op="mean")
    assert numbers == [
        sum(2**70 + other for other in range(size)) / size,
        wanted[0],
    ]
    with pytest.raises(rw.PayloadTypeError, match="beyond the range of floats"):
        rw.all_reduce(10**400, op="mean")
    assert rw.all_reduce(10**400) == size * 10**400
    mixed: Any = 10**400 if rank == 0 else 0.5
    if size > 1:
        with pytest.raises(rw.PayloadTypeError, match="beyond the range of floats"):
            rw.all_reduce(mixed)


class Column:
    """Like a Series of pandas, it has the attributes of a numpy array, but is not one."""

    ndim = 1

    def item(self) -> int:
        raise ValueError("can only convert an array of size 1 to a Python scalar")


def test_columns_of_numbers_are_refused(comm: Group) -> None:
    with pytest.raises(rw.PayloadTypeError, match="got a Column"):
        rw.all_reduce(Column())
    assert rw.all_reduce(1) == comm.size


def test_weighted_means_of_all_kinds_of_values(comm: Group) -> None:
    """A rank without samples has what is not a number, and does not count."""
    rank, size = rw.get_rank(), comm.size
    weights = [(3, 0, 2)[other % 3] for other in range(size)]
    total = sum(weights)
    values = [other + 1 if weight else math.nan for other, weight in enumerate(weights)]
    mean = sum(weight * (other + 1) for other, weight in enumerate(weights)) / total
    for kind in (int, float, np.int64, torch.tensor):
        own: Any = kind(weights[rank])
        array = np.full(3, float(values[rank]))
        value: dict[str, Any] = {"number": values[rank], "array": array, "none": None, "ints": torch.tensor([rank, 2])}
        found = rw.all_reduce(value, op="mean", weight=own)
        assert found["number"] == mean
        assert found["array"].tolist() == [mean] * 3
        assert found["none"] is None
        ranks = sum(weight * other for other, weight in enumerate(weights)) / total
        assert found["ints"].tolist() == [ranks, 2.0]
        assert found["ints"].dtype is torch.float64
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for length in (2, 5000):  # those of one number would overflow in half precision
            tensor = torch.full((length,), values[rank] * 10_000.0, dtype=dtype)
            weighted = rw.all_reduce(tensor, op="mean", weight=weights[rank])
            assert weighted.dtype is dtype
            torch.testing.assert_close(weighted, torch.full_like(tensor, mean * 10_000.0))
            nothing = rw.all_reduce(tensor, op="mean", weight=0.0, async_op=True).wait()
            assert nothing.cpu().isnan().all()  # on XLA devices not of complex numbers
    assert rw.all_reduce(2**70 + rank * 2**60, op="mean", weight=2**60) == 2**70 + 2**60 * (size - 1) / 2
    assert math.isnan(rw.all_reduce(rank, op="mean", weight=0))


def test_weights_that_cannot_be_used(comm: Group) -> None:
    bad: list[Any] = [-1, math.nan, math.inf, True, "2", 1j, torch.ones(2), torch.ones((), device="meta")]
    for weight in bad:
        with pytest.raises(rw.InvalidArgumentError, match="not a finite number of at least 0"):
            rw.all_reduce(1.0, op="mean", weight=weight)
    with pytest.raises(rw.InvalidArgumentError, match="weight=2 is for op='mean', got op='sum'"):
        rw.all_reduce(1.0, weight=2)
    with pytest.raises(rw.PayloadTypeError):
        rw.all_reduce("text", op="mean", weight=2)
    is_second = rw.get_rank() == 1
    if comm.size > 1:
        with pytest.raises(rw.MismatchError, match=r"weight='given'\) on .*all_reduce\(op='mean'\) on rank 1"):
            rw.all_reduce(1.0, op="mean", weight=None if is_second else 1)
        with pytest.raises(rw.InvalidArgumentError if is_second else rw.RemoteRankError, match="weight=-2"):
            rw.all_reduce(1.0, op="mean", weight=-2 if is_second else 1)
        value = torch.ones(2, dtype=torch.bfloat16 if is_second else torch.float32)
        with pytest.raises(rw.MismatchError, match=r"float32\[2\] on \w+ on .*bfloat16"):
            rw.all_reduce(value, op="mean", weight=1)
    assert rw.all_reduce(1.0, op="mean", weight=2) == 1.0
