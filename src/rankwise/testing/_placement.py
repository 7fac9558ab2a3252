"""The placement of a fake launcher's ranks: tasks on nodes, one node filled after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from rankwise._arguments import as_integer, integer
from rankwise._environment.facts import MAX_RANKS
from rankwise.errors import InvalidArgumentError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a launcher, with its topology.

    Attributes:
        rank, local_rank, local_world_size, node_rank: As in `rankwise.Topology`.
        first_rank: The lowest rank on its node.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    first_rank: int


def tasks_per_node(tasks: object, nodes: object) -> list[int]:
    """Return the number of tasks on each node.

    Args:
        tasks: The number on every node, or an iterable with the number on each.
        nodes: The number of nodes; None for one node, or if `tasks` is an iterable.

    Raises:
        InvalidArgumentError: These are not numbers of tasks and nodes.
    """
    count = None if nodes is None else integer_in_range(1, MAX_RANKS, nodes, "nodes")
    each = integer(tasks)
    if each is not None:
        if not 1 <= each * (count or 1) <= MAX_RANKS:
            raise InvalidArgumentError(f"tasks={shown(tasks)}, nodes={shown(nodes)}: wanted 1 to {MAX_RANKS} ranks")
        return [each] * (count or 1)
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Iterable) or getattr(tasks, "ndim", 1) != 1:
        raise InvalidArgumentError(f"tasks={shown(tasks)} is neither a number of tasks nor one for each node")
    listed = [integer_in_range(1, MAX_RANKS, number, "tasks on a node") for number in islice(tasks, MAX_RANKS + 1)]
    if not listed or sum(listed) > MAX_RANKS or count not in {None, len(listed)}:
        raise InvalidArgumentError(
            f"tasks={shown(listed)}, nodes={shown(nodes)}: wanted one number of tasks for each node, and 1 to "
            f"{MAX_RANKS} in all"
        )
    return listed


def integer_in_range(least: int, most: int, value: object, name: str) -> int:
    """Return an integer argument.

    Raises:
        InvalidArgumentError: It is not an integer from `least` to `most`.
    """
    number = as_integer(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name}={shown(value)} is not from {least} to {most}")
    return number


def iter_tasks(per_node: Sequence[int]) -> Iterator[Task]:
    """Yield the task of each rank, in order of ranks."""
    first_rank = 0
    for node_rank, count in enumerate(per_node):
        for local_rank in range(count):
            yield Task(
                rank=first_rank + local_rank,
                local_rank=local_rank,
                local_world_size=count,
                node_rank=node_rank,
                first_rank=first_rank,
            )
        first_rank += count


def compressed(counts: Sequence[int]) -> str:
    """Return numbers in Slurm's notation: [2, 2, 2, 1] is "2(x3),1"."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
