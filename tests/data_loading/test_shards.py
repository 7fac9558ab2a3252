"""The elements of iterables, for ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import rankwise as rw
from rankwise.data import shard


class Elements(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(shard(iter(range(self.length))))


@pytest.mark.ranks("serial", 1, 2, 3)
@pytest.mark.usefixtures("session", "torch_random")
def test_each_element_belongs_to_one_rank_and_one_worker() -> None:
    size, rank = rw.get_world_size(), rw.get_rank()
    for length in (0, 1, 10, 17):
        for workers in (0, 2):
            own = [int(element) for element in DataLoader(Elements(length), batch_size=None, num_workers=workers)]
            assert sorted(own) == list(range(rank, length, size))
    assert shard(range(10)) == range(rank, 10, size)
    assert shard(["a", "b", "c"]) == ["a", "b", "c"][rank::size]
    assert shard(("a", "b", "c")) == ("a", "b", "c")[rank::size]
    assert list(itertools.islice(shard(itertools.count()), 2)) == [rank, rank + size]


def test_what_is_no_iterable() -> None:
    wrong: Any = 3
    with pytest.raises(rw.InvalidArgumentError, match="shard takes an iterable, got 3"):
        shard(wrong)
