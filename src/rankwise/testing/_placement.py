"""Tasks on nodes, one node filled after the other: where each rank of a made-up launcher is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from rankwise._arguments import as_integer, integer
from rankwise._environment.facts import MAX_RANKS
from rankwise.errors import InvalidArgumentError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A rank's place among tasks that fill one node after the other."""

    rank: int
    local_rank: int
    local_size: int
    node: int
    first: int


def tasks_per_node(tasks: object, nodes: object) -> list[int]:
    """Return how many tasks each node has.

    Args:
        tasks: How many: on every node, or on each.
        nodes: How many nodes; None if `tasks` tells, or there is one.

    Raises:
        InvalidArgumentError: These are no numbers of tasks and nodes.
    """
    count = None if nodes is None else between(1, MAX_RANKS, nodes, "nodes")
    each = integer(tasks)
    if each is not None:
        if not 1 <= each * (count or 1) <= MAX_RANKS:
            raise InvalidArgumentError(f"tasks={shown(tasks)}, nodes={shown(nodes)}: wanted 1 to {MAX_RANKS} ranks")
        return [each] * (count or 1)
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Iterable) or getattr(tasks, "ndim", 1) != 1:
        raise InvalidArgumentError(f"tasks={shown(tasks)} is neither a number of tasks nor one for each node")
    listed = [between(1, MAX_RANKS, number, "tasks on a node") for number in islice(tasks, MAX_RANKS + 1)]
    if not listed or sum(listed) > MAX_RANKS or count not in {None, len(listed)}:
        raise InvalidArgumentError(
            f"tasks={shown(listed)}, nodes={shown(nodes)}: wanted one number of tasks for each node, and 1 to "
            f"{MAX_RANKS} in all"
        )
    return listed


def between(least: int, most: int, value: object, name: str) -> int:
    """Return an integer argument.

    Raises:
        InvalidArgumentError: It is no integer, or not from `least` to `most`.
    """
    number = as_integer(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name}={shown(value)} is not from {least} to {most}")
    return number


def places(per_node: Sequence[int]) -> Iterator[Task]:
    """Give the place of each rank, in order."""
    rank = 0
    for node, count in enumerate(per_node):
        for local_rank in range(count):
            yield Task(rank=rank + local_rank, local_rank=local_rank, local_size=count, node=node, first=rank)
        rank += count


def compressed(counts: Sequence[int]) -> str:
    """Return counts as Slurm writes them: [2, 2, 2, 1] is "2(x3),1"."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
