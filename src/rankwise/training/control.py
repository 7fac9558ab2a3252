"""Which rank does what: on rank zero only, on rank zero first."""

from __future__ import annotations

import functools
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from rankwise.errors import RemoteRankError
from rankwise.session.current import joined_session
from rankwise.session.identity import get_rank, is_rank_zero

P = ParamSpec("P")
R = TypeVar("R")


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero and does nothing, returning None, on the others.

    Local: no rank waits for another. Works before `init()` too, for the rank is looked up at each call.

    Example:
        >>> @rank_zero_only
        ... def save(path):
        ...     return f"saved {path}"
        >>> save("model.pt")
        'saved model.pt'
    """

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if is_rank_zero() else None

    return on_rank_zero


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank zero, and only then on the other ranks: for what is downloaded or cached once.

    Collective over the session. The block itself must not contain collectives. Rank zero has the session's timeout.

    Raises:
        RemoteRankError: The block failed on rank zero; raised on the others, which do not run it.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> with rank_zero_first():
        ...     data = "downloaded, or found in the cache"
    """
    comm = joined_session().comm
    if get_rank() != 0:
        failure = comm.announce(b"", src=0)
        if failure:
            host, _, text = failure.decode().partition("\n")
            raise RemoteRankError(rank=0, host=host, traceback=text)
        yield
        return
    try:
        yield
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        comm.announce(f"{socket.gethostname()}\n{text}".encode(), src=0)
        raise
    comm.announce(b"", src=0)
