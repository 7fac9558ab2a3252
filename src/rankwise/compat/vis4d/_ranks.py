"""Who this is, from one source: a session or process group that is open, else the launcher's variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import rankwise
from rankwise._session.current import is_joined
from rankwise._training import rank_control

P = ParamSpec("P")
R = TypeVar("R")


def get_world_size() -> int:
    """Return how many ranks there are; 1 alone, as in the shell of a Slurm job.

    Local. Right before joining too.

    Example:
        >>> get_world_size()
        1
    """
    return rankwise.get_world_size()


def get_rank() -> int:
    """Return this process's rank among all; 0 alone.

    Local. Right before joining too, on every node.

    Example:
        >>> get_rank()
        0
    """
    return rankwise.get_rank()


def get_local_rank() -> int:
    """Return this process's rank on its node; 0 alone.

    Local.

    Raises:
        NotJoinedError: There are several ranks, and nobody has said which one on its node this is.

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
    """Wait until every rank is here.

    Collective over the session; nothing happens where nobody has joined one.
    """
    if is_joined():
        rankwise.barrier()


def rank_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero only, and returns None on the others.

    Local: nobody waits. `rankwise.one_rank_only` is for what others wait for, or want the result of. Of a coroutine or
    generator function the others get None too.

    Example:
        >>> rank_zero_only(len)("four")
        4
    """
    return rank_control.called_on_rank_zero(func)
