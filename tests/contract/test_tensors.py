"""One body for every world: collectives for tensors only. In place, concatenated, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group

pytestmark = [
    pytest.mark.ranks("serial", 1, 2, 3, 4),
    pytest.mark.usefixtures("torch_random"),
]


def test_all_reduce_in_place(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    total = sum(range(size))
    for length in (0, 1, 7, 4096, 400_001):
        for dtype in (torch.float32, torch.int64, torch.int16, torch.float16, torch.complex64):
            tensor = torch.full((length,), rank, dtype=dtype)
            address = tensor.data_ptr()
            assert rw.all_reduce_(tensor) is tensor
            assert tensor.data_ptr() == address
            assert (tensor == total).all()
    grid = torch.arange(6.0).reshape(2, 3).t()
    rw.all_reduce_(grid, op="mean")
    assert torch.equal(grid, torch.arange(6.0).reshape(2, 3).t())
    weight = torch.ones(2, requires_grad=True)
    assert rw.all_reduce_(weight).tolist() == [size, size]


def test_all_reduce_in_place_refuses_results_of_another_dtype(comm: Group) -> None:
    for tensor, op in ((torch.ones(2, dtype=torch.bool), "sum"), (torch.ones(2, dtype=torch.int64), "mean")):
        with pytest.raises(rw.PayloadTypeError, match="another dtype"):
            rw.all_reduce_(tensor, op=op)
    with pytest.raises(rw.PayloadTypeError, match="takes a tensor"):
        rw.all_reduce_(1)


def test_large_reductions_are_the_same_on_all_ranks(comm: Group) -> None:
    torch.manual_seed(rw.get_rank())
    for shape in ((1025,), (333, 1001), (1 << 20,), ((1 << 20) + 1,)):
        value = torch.rand(shape)
        wanted = torch.stack(rw.all_gather(value))
        for op, reduced in (
            ("sum", wanted.sum(dim=0)),
            ("mean", wanted.mean(dim=0)),
            ("product", wanted.prod(dim=0)),
            ("min", wanted.amin(dim=0)),
        ):
            ours = rw.all_reduce(value, op=op)
            torch.testing.assert_close(ours, reduced)
            assert all(torch.equal(ours, other) for other in rw.all_gather(ours))


def test_reduce_scatter_of_pieces_of_any_size(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    for length in (0, 3, 100_000):
        pieces = [torch.full((length + place % 2, 2), place + rank) for place in range(size)]
        piece = rw.reduce_scatter(pieces)
        assert piece.shape == (length + rank % 2, 2)
        assert (piece == rank * size + sum(range(size))).all()
    assert rw.reduce_scatter([torch.ones(2)] * size, op="mean").tolist() == [1, 1]


def test_all_gather_cat_concatenates_tensors(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    counts = list(range(size))
    for width in (1, 5000):
        whole = rw.all_gather_cat(torch.full((rank, width), rank))
        assert whole.shape == (sum(counts), width)
        assert whole[:, 0].tolist() == [other for other in counts for _ in range(other)]
    beside = rw.all_gather_cat(torch.full((2, rank), rank), dim=-1)
    assert beside[1].tolist() == [other for other in counts for _ in range(other)]
    assert rw.all_gather_cat(torch.tensor(rank)).tolist() == counts
    assert rw.all_gather_cat(torch.empty(0, 3)).shape == (0, 3)
    with pytest.raises(rw.InvalidArgumentError, match="dim=1"):
        rw.all_gather_cat(torch.ones(2), dim=1)
    with pytest.raises(rw.PayloadTypeError, match="takes a tensor"):
        rw.all_gather_cat([1])  # type: ignore[call-overload]  # that is the point


def test_gradients_flow_through_all_reduce(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    for op in ("sum", "mean"):
        for length in (2, 5000):
            weight = torch.full((length,), float(rank), requires_grad=True)
            other = torch.ones(3, dtype=torch.float64, requires_grad=True)
            reduced: Any = rw.all_reduce({"w": weight * 2, "o": other, "n": 1}, op=op, differentiable=True)
            assert reduced["n"] == (size if op == "sum" else 1)
            # Each rank's loss weighs the reduced value by its rank + 1: a gradient is the same reduction of those.
            (reduced["w"].sum() * (rank + 1) + reduced["o"].sum()).backward()
            scale = sum(range(1, size + 1)) / (1 if op == "sum" else size)
            assert weight.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(weight.grad, torch.full((length,), 2 * scale))
            torch.testing.assert_close(other.grad, torch.full_like(other, size if op == "sum" else 1))
    with pytest.raises(rw.InvalidArgumentError, match="not differentiable"):
        rw.all_reduce(torch.ones(1), op="max", differentiable=True)


def test_gradients_flow_through_all_gather(comm: Group) -> None:
    rank, size = rw.get_rank(), comm.size
    own = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    parts = rw.all_gather(own, differentiable=True)
    assert [part.shape[0] for part in parts] == [other + 1 for other in range(size)]
    sum((part * (rank + 1)).sum() * (place + 1) for place, part in enumerate(parts)).backward()  # type: ignore[union-attr]
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.full_like(own, (rank + 1) * sum(range(1, size + 1))))

    own = torch.full((rank + 1,), float(rank), requires_grad=True)
    whole = rw.all_gather_cat(own, differentiable=True)
    (whole * whole).sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.full_like(own, 2.0 * rank * size))
    with pytest.raises(rw.PayloadTypeError, match="tensors of floats"):
        rw.all_gather(1, differentiable=True)


def test_gradients_of_gradients(comm: Group) -> None:
    """Of s², where s is the sum of w³ over all ranks: the gradient on each rank is 6ws·w, and its gradient not 0."""
    size = comm.size
    for total in (
        lambda w: rw.all_reduce(w**3, differentiable=True),
        lambda w: rw.all_gather_cat(w**3, differentiable=True).sum(),
    ):
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((total(weight) ** 2).sum(), weight, create_graph=True)
        assert gradient.item() == 6 * size**2
        (second,) = torch.autograd.grad(gradient.sum(), weight)
        assert second.item() == 12 * size**2 + 18 * size**2, "through w, and through s on every rank"


def test_conjugate_views_are_reduced_by_value(comm: Group) -> None:
    for length in (2, 5000):
        for reduce in (rw.all_reduce, rw.all_reduce_):
            lazy = torch.full((length,), 1 + 1j, dtype=torch.complex64).conj()
            assert reduce(lazy.clone().imag).tolist() == [-comm.size] * length
            assert reduce(lazy).tolist() == [comm.size * (1 - 1j)] * length


def test_the_default_device_is_not_used_for_messages(comm: Group) -> None:
    small, large = torch.ones(3), torch.ones(9000)
    with torch.device("meta"):
        for value in (small, large):
            assert rw.all_reduce(value).sum().item() == comm.size * len(value)
            assert rw.all_reduce_(value.clone()).device == value.device
            assert len(rw.all_gather_cat(value[rw.get_rank() :])) == sum(len(value) - rank for rank in range(comm.size))
            assert rw.broadcast({"text" * 2000: value})["text" * 2000].tolist() == value.tolist()
            assert rw.reduce_scatter([value] * comm.size).sum().item() == comm.size * len(value)
        assert rw.all_reduce(2) == 2 * comm.size
