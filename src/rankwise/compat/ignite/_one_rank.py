"""`one_rank_only` and `one_rank_first`: code that one rank runs alone, or before the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import rankwise
from rankwise.compat.ignite._identity import joined_session
from rankwise.compat.ignite._operations import barrier
from rankwise.compat.ignite._queries import get_rank, get_world_size
from rankwise.errors import InvalidArgumentError
from rankwise.extend import collectives
from rankwise.extend._dropins import world_group

P = ParamSpec("P")
R = TypeVar("R")


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[..., Any]:
    """Return a decorator: the function runs on one rank, and returns None on the others.

    Local; Collective over the world with a barrier: the others wait without a timeout until the function has returned,
    and raise if it failed.

    Args:
        rank: The rank that runs the function. If the world has no such rank, no rank runs it.
        with_barrier: The other ranks wait.

    Raises:
        RemoteRankError: The function failed, with a barrier; raised on the others.
        CollectiveError: The rank ended, with a barrier.

    Example:
        >>> @one_rank_only()
        ... def save():
        ...     return "saved"
        >>> save()
        'saved'
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(fn)
        def on_one_rank(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if not with_barrier:
                return fn(*args, **kwargs) if get_rank() == rank else None
            if joined_session() is None:
                return fn(*args, **kwargs) if rank == 0 else None
            if not 0 <= rank < get_world_size():
                barrier()
                return None
            with rankwise.one_rank_only(rank) as mine:
                return fn(*args, **kwargs) if mine else None

        return on_one_rank

    return decorate


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on one rank, and then on the others.

    Collective over the world; over the ranks of the node, if `local`. The others wait without a timeout until the
    block has ended or failed. The block must not contain collectives.

    Args:
        rank: The rank that runs the block first.
        local: `rank` is a local rank, which runs the block first on its node.

    Raises:
        InvalidArgumentError: There is no such rank.
        RemoteRankError: The block failed on that rank; raised on the others, which do not run it.
        CollectiveError: That rank ended.

    Example:
        >>> with one_rank_first():
        ...     data = "downloaded, or found in the cache"
    """
    session = joined_session()
    if session is None:
        _check_rank(rank, 1)
        yield
        return
    group = rankwise.node_group() if local else world_group(session)
    with collectives.collective("one_rank_first", group=group):
        _check_rank(rank, group.size)
    settings = {"local": local}
    with collectives.one_rank_first("one_rank_first", group.ranks[rank], settings=settings, group=group):
        yield


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank should be between 0 and {size - 1}, but given {rank!r}")
