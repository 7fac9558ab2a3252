"""Results in the order of the dataset, and indices that are not there once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise.data import GlobalBatches, in_order, shard

pytestmark = [pytest.mark.ranks("serial", 1, 2, 3, 4), pytest.mark.usefixtures("session")]


def own(total: int) -> list[int]:
    return [index for batch in GlobalBatches(total, 16) for index in batch]


def test_results_are_in_order_once_on_every_rank() -> None:
    for total in (1, 2, 7, 1000):
        indices = own(total)
        tensor = torch.tensor(indices, dtype=torch.int64)
        doubled: Any = np.array(indices) * 2
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
            found = in_order(tensor, (tensor % 2).to(dtype), total=total)
            assert torch.equal(found, (torch.arange(total) % 2).to(dtype))
        rows = torch.stack([tensor, -tensor], dim=1).float().requires_grad_()
        found = in_order(indices, rows, total=total)
        assert not found.requires_grad
        assert torch.equal(found, torch.stack([torch.arange(total), -torch.arange(total)], dim=1).float())
        assert in_order(np.array(indices), [str(index) for index in indices], total=total) == list(
            map(str, range(total))
        )
        assert in_order(tensor.to(torch.int32), doubled, total=total) == list(range(0, 2 * total, 2))


def test_ranks_may_have_nothing() -> None:
    """Of any kind."""
    last = rw.get_rank() == rw.get_world_size() - 1
    kinds: list[Any] = [[], torch.empty(0), torch.empty(0, 7)]
    for nothing in kinds:
        values = torch.eye(3) if last else nothing
        found = in_order(torch.arange(3) if last else torch.tensor([]), values, total=3)
        assert torch.equal(found, torch.eye(3))
        assert in_order([0] if last else [], ["a"] if last else nothing, total=1) == ["a"]
    assert in_order([], [], total=0) == []
    assert in_order([], torch.empty(0, 3), total=0).shape == (0, 3)


def test_indices_that_are_not_there_once_are_an_error_on_all_ranks() -> None:
    size, rank = rw.get_world_size(), rw.get_rank()
    holders = "rank 0" if size == 1 else f"ranks 0-{size - 1}"
    with pytest.raises(rw.InvalidArgumentError) as caught:
        in_order([0, -1, 30, 30], [1, 2, 3, 4], total=20)
    message = str(caught.value)
    assert message.startswith("in_order takes each index of 0 to 19 once, from all ranks together; out of range: ")
    assert f"out of range: -1 on {holders}, 30 on {holders}; " in message
    assert message.endswith("missing: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 9 more")
    assert (f"there more than once: 0 on {holders}" in message) == (size > 1)
    with pytest.raises(rw.InvalidArgumentError, match=r"together; there more than once: 3 on rank 0$"):
        in_order([0, 1, 2, 3, 3, 4] if rank == 0 else [], [0] * 6 if rank == 0 else [], total=5)
    assert in_order(shard([0, 1, 2]), shard([0, 1, 2]), total=3) == [0, 1, 2]


def test_what_cannot_be_results() -> None:
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        ([0], [1, 2], 1, rw.InvalidArgumentError, "1 indices and 2 values"),
        ([0.5], [1], 1, rw.InvalidArgumentError, "index of in_order=0.5"),
        (torch.tensor([0.5]), [1], 1, rw.InvalidArgumentError, "are integers"),
        (torch.tensor([True]), [1], 1, rw.InvalidArgumentError, "are integers"),
        (torch.tensor([[0]]), [1], 1, rw.InvalidArgumentError, r"shape \[n\]"),
        (0, [1], 1, rw.InvalidArgumentError, "sequence of indices, got 0"),
        ([0], 1.0, 1, rw.PayloadTypeError, "sequence of n objects"),
        ([0], torch.tensor(1.0), 1, rw.PayloadTypeError, "sequence of n objects"),
        ([0], "a", 1, rw.PayloadTypeError, "sequence of n objects"),
        ([0], [lambda: 0, 1][:1], -1, rw.InvalidArgumentError, "total=-1"),
        ([0], [1], 1.0, rw.InvalidArgumentError, "total=1.0"),
    ]
    for indices, values, total, kind, message in cases:
        with pytest.raises(kind, match=message):
            in_order(indices, values, total=total)


@pytest.mark.ranks(2)
def test_ranks_that_pass_different_values() -> None:
    rank = rw.get_rank()
    values: Any = torch.zeros(1) if rank else [0]
    with pytest.raises(rw.MismatchError, match=r"a sequence of objects on rank 0, torch.float32 \[n\] on rank 1"):
        in_order([rank], values, total=2)
    with pytest.raises(rw.MismatchError, match=r"torch.float32 \[n, 2\] on rank 0, torch.float32 \[n, 3\] on rank 1"):
        in_order([rank], torch.zeros(1, 2 + rank), total=2)
    with pytest.raises(rw.MismatchError, match="total"):
        in_order([rank], [0], total=2 + rank)
    with pytest.raises((rw.InvalidArgumentError, rw.RemoteRankError), match="1 indices and 0 values"):
        in_order([rank], [0] * rank, total=2)
    assert in_order([rank], [rank], total=2) == [0, 1]
