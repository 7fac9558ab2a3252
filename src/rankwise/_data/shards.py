"""The elements of an iterable that are this rank's, and in a worker of a loader this worker's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

from torch.utils.data import get_worker_info

from rankwise._session.getters import get_rank, get_world_size
from rankwise.errors import InvalidArgumentError, shown

T = TypeVar("T")


@overload
def shard(iterable: range) -> range: ...
@overload
def shard(iterable: list[T]) -> list[T]: ...
@overload
def shard(iterable: Iterable[T]) -> Iterable[T]: ...
def shard(iterable: Iterable[Any]) -> Iterable[Any]:
    """Return the elements of an iterable that are this rank's: one of `world_size` in turn, beginning with its rank.

    Local. Each element belongs to one rank, and the numbers of elements differ by one at most. In a worker process of a
    DataLoader, the elements of its rank are divided among the workers in the same way: so call it there, in
    `__iter__` of an IterableDataset, and not in `__init__`, where there are no workers yet.

    Args:
        iterable: The same on all ranks. An iterable that is not a sequence is read to its end by each of them.

    Returns:
        Of a list, range, tuple or another sequence, a slice; otherwise an iterator.

    Raises:
        InvalidArgumentError: It is not an iterable.

    Example:
        >>> from rankwise.data import shard
        >>> shard(range(10))  # on 4 ranks, rank 1: range(1, 10, 4)
        range(0, 10)
        >>> list(shard(line for line in ("a", "b", "c")))  # on 2 ranks, rank 0: ['a', 'c']
        ['a', 'b', 'c']
    """
    worker = get_worker_info()
    rank, world_size = get_rank(), get_world_size()
    if worker is None:
        first, step = rank, world_size
    else:
        # So that an element is of the same rank with any number of workers.
        first, step = worker.id * world_size + rank, worker.num_workers * world_size
    if isinstance(iterable, Sequence):
        return iterable[first::step]
    try:
        return islice(iterable, first, None, step)
    except TypeError as error:
        raise InvalidArgumentError(f"shard takes an iterable, got {shown(iterable)}") from error
