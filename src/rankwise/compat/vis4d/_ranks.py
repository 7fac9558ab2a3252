"""Ranks and sizes, from one source: the open session or process group, otherwise the launcher's variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import rankwise
from rankwise import is_joined
from rankwise.extend._dropins import called_on_rank_zero

P = ParamSpec("P")
R = TypeVar("R")


def get_world_size() -> int:
    """Return the number of ranks; 1 alone, also in the shell of a Slurm job.

    Local. It is right before joining too.

    Example:
        >>> get_world_size()
        1
    """
    return rankwise.get_world_size()


def get_rank() -> int:
    """Return this process's rank among all; 0 alone.

    Local. It is right before joining too, on every node.

    Example:
        >>> get_rank()
        0
    """
    return rankwise.get_rank()


def get_local_rank() -> int:
    """Return this process's rank on its node; 0 alone.

    Local.

    Raises:
        NotJoinedError: There are several ranks, and neither a launcher nor the session provides the local rank.

    Example:
        >>> get_local_rank()
        0
    """
    return rankwise.get_local_rank()


def distributed_available() -> bool:
    """Return whether this process has joined others.

    Local.

    Example:
        >>> distributed_available()
        False
    """
    return is_joined()


def synchronize() -> None:
    """Wait until every rank has entered the barrier.

    Collective over the session; a no-op without one.
    """
    if is_joined():
        rankwise.barrier()


def rank_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero only, and returns None on the others.

    Local: no rank waits for another. `rankwise.one_rank_only` makes the others wait, and can return them the result. A
    coroutine or generator function returns None on the others too.

    Example:
        >>> rank_zero_only(len)("four")
        4
    """
    return called_on_rank_zero(func)
