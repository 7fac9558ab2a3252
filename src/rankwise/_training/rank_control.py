"""Which rank does what: on rank zero only, on one rank for all, on rank zero first, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, overload

from rankwise._arguments import as_bool, integer
from rankwise._collectives.groups import node_group
from rankwise._collectives.rooted import broadcast
from rankwise._comm.control.protocol import Call
from rankwise._comm.group import Comm
from rankwise._session.current import joined_session
from rankwise._session.getters import get_rank, get_world_size, is_rank_zero
from rankwise._training.block_decorator import Block, as_method, check_function
from rankwise._training.exclusive_section import ExclusiveSection
from rankwise.errors import InvalidArgumentError, shown

P = ParamSpec("P")
R = TypeVar("R")


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero and does nothing, returning None, on the others.

    Local: no rank waits for another. Works before `init()` too, for the rank is looked up at each call. Takes class and
    static methods as well, above or below their decorator.

    Raises:
        InvalidArgumentError: What is decorated is no function, or one whose body does not run when it is called:
            a coroutine or a generator, of which the others would get None.

    Example:
        >>> @rank_zero_only
        ... def save(path):
        ...     return f"saved {path}"
        >>> save("model.pt")
        'saved model.pt'
    """
    check_function(fn.__func__ if isinstance(fn, (classmethod, staticmethod)) else fn, "rank_zero_only")
    return called_on_rank_zero(fn)


def called_on_rank_zero(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that calls another on rank zero, of whatever kind it is, and returns None on the others.

    Local.
    """
    if isinstance(fn, (classmethod, staticmethod)):
        return as_method(called_on_rank_zero(fn.__func__), type(fn))

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if is_rank_zero() else None

    return on_rank_zero


class OneRank:
    """What `one_rank_only` returns: a context, and in those derived from it a decorator."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._turns: list[tuple[ExclusiveSection, bool, ExitStack]] = []

    def __enter__(self) -> bool:
        """Begin, and return whether this is the rank."""
        comm = joined_session().comm
        call = Call("one_rank_only", {"rank": self._rank})
        with comm.collective(call) as me:
            place = comm.group_rank_of(self._rank, "rank")
            comm.verify(call)
        turn = ExclusiveSection(comm, call, place)
        mine = me == place
        with ExitStack() as block:
            block.enter_context(turn.reserved())
            if mine:
                turn.begin()
            self._turns.append((turn, mine, block.pop_all()))
        return mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        turn, mine, block = self._turns.pop()
        block.close()
        if mine:
            turn.end(error)
        elif error is None:
            turn.wait()


class Shared(OneRank):
    """As a decorator: a function that runs on the one rank, and gives its result to all."""

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        if isinstance(fn, (classmethod, staticmethod)):
            return as_method(self(fn.__func__), type(fn))
        check_function(fn, "one_rank_only")

        @functools.wraps(fn)
        def on_one_rank(*args: P.args, **kwargs: P.kwargs) -> R:
            result: Any = None
            with self as mine:
                if mine:
                    result = fn(*args, **kwargs)
            shared: R = broadcast(result, src=self._rank)
            return result if mine else shared

        return on_one_rank


class Unshared(OneRank):
    """As a decorator: a function that runs on the one rank, and at once returns None on the others."""

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        if isinstance(fn, (classmethod, staticmethod)):
            return as_method(self(fn.__func__), type(fn))
        check_function(fn, "one_rank_only")

        @functools.wraps(fn)
        def on_one_rank(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if self._rank >= get_world_size():
                raise InvalidArgumentError(f"rank={shown(self._rank)} is not one of {get_world_size()} ranks")
            return fn(*args, **kwargs) if get_rank() == self._rank else None

        return on_one_rank


@overload
def one_rank_only(rank: int = ..., *, share: Literal[True] = ...) -> Shared: ...
@overload
def one_rank_only(rank: int = ..., *, share: Literal[False]) -> Unshared: ...
@overload
def one_rank_only(rank: int = ..., *, share: bool) -> Shared | Unshared: ...
def one_rank_only(rank: int = 0, *, share: bool = True) -> Shared | Unshared:
    """Run a function, or a block, on one rank, and give what it returns or raises to all.

    Collective over the session. The others wait: as long as it takes, and not after it failed. What runs must not
    contain collectives. As a context it gives whether this is the rank, and the others wait at the end of the block.

    Args:
        rank: The global rank that runs it.
        share: Give the result to all ranks. If not, a decorated function is Local: the other ranks return None at once,
            and hear of no error.

    Raises:
        InvalidArgumentError: There is no such rank, or it is used without parentheses: `@one_rank_only()`. Raised when
            it is called if it can be, else by the function.
        RemoteRankError: It failed there; raised on the others.
        CollectiveError: The rank is gone.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> @one_rank_only(0)
        ... def count_files():
        ...     return 42
        >>> count_files()
        42
        >>> with one_rank_only(0) as mine:
        ...     if mine:
        ...         data = "downloaded"
    """
    if callable(rank):
        raise InvalidArgumentError("one_rank_only is used without parentheses: write @one_rank_only()")
    place = integer(rank)
    if place is None or place < 0:
        raise InvalidArgumentError(f"rank={shown(rank)} is not a rank: ranks are counted from 0")
    return Shared(place) if as_bool(share, "share") else Unshared(place)


def rank_zero_first(*, local: bool = False) -> Block:
    """Run a block on rank zero, and only then on the other ranks: for what is downloaded or cached once.

    Collective over the session, a context and a decorator. The others wait: as long as it takes, and not after it
    failed. The block itself must not contain collectives.

    Args:
        local: Run it first on the first rank of each node, for what every node has for itself.

    Raises:
        InvalidArgumentError: `local` is neither True nor False, or a coroutine or generator is decorated.
        RemoteRankError: The block failed on the first rank; raised on the others, which do not run it.
        CollectiveError: The first rank is gone.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> with rank_zero_first():
        ...     data = "downloaded, or found in the cache"
    """
    return Block("rank_zero_first", functools.partial(_first, by_node=as_bool(local, "local")))


@contextmanager
def _first(*, by_node: bool) -> Iterator[None]:
    comm = node_group() if by_node else joined_session().comm
    call = Call("rank_zero_first", {"local": by_node})
    place = _begin(comm, call)
    turn = ExclusiveSection(comm, call, 0)
    with turn.reserved():
        if place == 0:
            with turn.working():
                yield
        else:
            turn.wait()
            yield


def in_rank_order() -> Block:
    """Run a block on one rank after the other, in the order of ranks.

    Collective over the session, a context and a decorator. Every rank leaves the block when the last one has run it.
    The block itself must not contain collectives.

    Raises:
        InvalidArgumentError: A coroutine or generator is decorated, whose body would run after the block.
        RemoteRankError: The block failed on another rank; those after it do not run it.
        CollectiveError: A rank is gone.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> with in_rank_order():
        ...     print("rank after rank")
        rank after rank
    """
    return Block("in_rank_order", _in_order)


@contextmanager
def _in_order() -> Iterator[None]:
    comm = joined_session().comm
    call = Call("in_rank_order")
    place = _begin(comm, call)
    last = comm.size - 1
    # Each waits for the one before it, and in the end all for the last: so what ended a turn reaches every rank.
    turns = [ExclusiveSection(comm, call, other, readers=last if other == last else 1) for other in range(comm.size)]
    with turns[place].reserved(), turns[place].working():
        if place:
            turns[place - 1].wait()
        yield
    if place != last:
        turns[last].wait()


def _begin(comm: Comm, call: Call) -> int:
    """Meet the others at the beginning of something that is done in turns, and return this rank's place."""
    with comm.collective(call) as place:
        comm.verify(call)
    return place
