"""Functions and blocks that run on some ranks only, or on one rank after the other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Literal, ParamSpec, TypeVar, overload

from rankwise._arguments import as_bool, integer
from rankwise._collectives.groups import comm_of, node_group
from rankwise._collectives.rooted import broadcast
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.group_rank import GroupRank
from rankwise._session.current import joined_session
from rankwise._session.getters import get_rank, get_world_size, is_rank_zero
from rankwise._training.exclusive_section import ExclusiveSection
from rankwise.errors import InvalidArgumentError, shown

# A call of these functions does not run their body.
_DEFERRED_KINDS: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)

P = ParamSpec("P")
R = TypeVar("R")


class BlockDecorator:
    """A context manager and decorator, returned by `rank_zero_first` and `in_rank_order`.

    It is like `contextlib.ContextDecorator`, but refuses coroutines and generators, whose bodies would run after the
    block.
    """

    def __init__(self, name: str, begin: Callable[[], AbstractContextManager[None]]) -> None:
        self._name = name
        self._begin = begin
        self._entered: list[AbstractContextManager[None]] = []

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs another one in the block."""
        if isinstance(fn, (classmethod, staticmethod)):
            return as_method(self(fn.__func__), type(fn))
        check_function(fn, self._name)

        @functools.wraps(fn)
        def in_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._begin():
                return fn(*args, **kwargs)

        return in_block

    def __enter__(self) -> None:
        block = self._begin()
        block.__enter__()
        self._entered.append(block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def as_method(function: Callable[P, R], method_type: Any) -> Callable[P, R]:  # noqa: ANN401 - classmethod or staticmethod
    """Return a class method or static method of a function, with the type of the function."""
    method: Callable[P, R] = method_type(function)
    return method


def check_function(fn: object, name: str) -> None:
    """Check that a call of a function runs its body.

    Raises:
        InvalidArgumentError: It is not a function, or a coroutine or generator function.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{name} takes a function, got a {type(fn).__qualname__}; put it right above `def`")
    if any(is_kind(fn) or is_kind(type(fn).__call__) for is_kind in _DEFERRED_KINDS):
        raise InvalidArgumentError(
            f"{name} takes a function whose call runs its body, got {getattr(fn, '__qualname__', fn)}, a coroutine "
            "or generator, whose body runs later; decorate a function that it calls"
        )


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs on rank zero and does nothing, returning None, on the others.

    Local: no rank waits for another. The rank is read at each call, so the decorator can be used before `init()`. Class
    methods and static methods can be decorated too, above or below `@classmethod` and `@staticmethod`.

    Raises:
        InvalidArgumentError: The decorated object is not a function; or it is a coroutine or generator function, for
            which the other ranks would get None.

    Example:
        >>> @rank_zero_only
        ... def save(path):
        ...     return f"saved {path}"
        >>> save("model.pt")  # on rank 1: None
        'saved model.pt'
    """
    check_function(fn.__func__ if isinstance(fn, (classmethod, staticmethod)) else fn, "rank_zero_only")
    return called_on_rank_zero(fn)


def called_on_rank_zero(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function like that of `rank_zero_only`, for any callable, also a coroutine or generator function.

    Local.
    """
    if isinstance(fn, (classmethod, staticmethod)):
        return as_method(called_on_rank_zero(fn.__func__), type(fn))

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if is_rank_zero() else None

    return on_rank_zero


class OneRankOnly:
    """A context manager, returned by `one_rank_only`; its subclasses are decorators too."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._entered: list[tuple[ExclusiveSection, bool, ExitStack]] = []

    def __enter__(self) -> bool:
        """Enter the block, and return whether this rank is the one that runs it."""
        comm = joined_session().comm
        with comm.call("one_rank_only", {"rank": self._rank}) as call:
            owner = comm.group_rank_of(self._rank, "rank")
            call.verify()
        section = ExclusiveSection(comm, call, owner)
        is_owner = comm.rank == owner
        with ExitStack() as stack:
            stack.enter_context(section.reserved())
            self._entered.append((section, is_owner, stack.pop_all()))
        return is_owner

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        section, is_owner, stack = self._entered.pop()
        stack.close()
        if is_owner:
            section.end(error)
        elif error is None:
            section.wait()


class OneRankOnlyShared(OneRankOnly):
    """A decorator: the function runs on one rank, and all ranks return its result."""

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        if isinstance(fn, (classmethod, staticmethod)):
            return as_method(self(fn.__func__), type(fn))
        check_function(fn, "one_rank_only")

        @functools.wraps(fn)
        def on_one_rank(*args: P.args, **kwargs: P.kwargs) -> R:
            result: Any = None
            # The function may take longer than the timeout of a collective: so the other ranks wait in the section, and
            # the broadcast begins when the result is there.
            with self as is_owner:
                if is_owner:
                    result = fn(*args, **kwargs)
            shared: R = broadcast(result, src=self._rank)
            return result if is_owner else shared

        return on_one_rank


class OneRankOnlyUnshared(OneRankOnly):
    """A decorator: the function runs on one rank, and returns None on the others without waiting."""

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
def one_rank_only(rank: int = ..., *, share: Literal[True] = ...) -> OneRankOnlyShared: ...
@overload
def one_rank_only(rank: int = ..., *, share: Literal[False]) -> OneRankOnlyUnshared: ...
@overload
def one_rank_only(rank: int = ..., *, share: bool) -> OneRankOnlyShared | OneRankOnlyUnshared: ...
def one_rank_only(rank: int = 0, *, share: bool = True) -> OneRankOnlyShared | OneRankOnlyUnshared:
    """Run a function or a block on one rank; its result or error is that of all ranks.

    Collective over the session. The other ranks wait without a timeout, until the function returns or raises. It must
    not call collectives. As a context manager it returns whether this rank runs the block, and the other ranks wait at
    the end of the block.

    Args:
        rank: The global rank that runs the function or block.
        share: Whether all ranks return the result. If False, a decorated function is Local: the other ranks return None
            without waiting, and raise no error if it fails.

    Raises:
        InvalidArgumentError: `rank` does not exist, or the parentheses of `@one_rank_only()` are missing. Raised by the
            decorated function if the size of the world has to be known.
        RemoteRankError: The function or block failed; raised on the other ranks.
        CollectiveError: The rank that runs it is dead.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> @one_rank_only(0)
        ... def count_files():
        ...     return 42
        >>> count_files()  # 42 on every rank
        42
        >>> with one_rank_only(0) as is_owner:
        ...     if is_owner:
        ...         data = "downloaded"
    """
    if callable(rank):
        raise InvalidArgumentError("one_rank_only is used without parentheses: write @one_rank_only()")
    checked = integer(rank)
    if checked is None or checked < 0:
        raise InvalidArgumentError(f"rank={shown(rank)} is not a rank: ranks are counted from 0")
    return OneRankOnlyShared(checked) if as_bool(share, "share") else OneRankOnlyUnshared(checked)


def rank_zero_first(*, local: bool = False) -> BlockDecorator:
    """Run a block on rank zero, and then on the other ranks, for example to download a file once and use it on all.

    Collective over the session. A context manager and a decorator. The other ranks wait without a timeout, until the
    block on rank zero ends or raises. The block must not call collectives.

    Args:
        local: Whether the block runs first on the first rank of each node, for files that each node has for itself.

    Raises:
        InvalidArgumentError: `local` is not a bool, or a coroutine or generator function is decorated.
        RemoteRankError: The block failed on the first rank; raised on the other ranks, which do not run it.
        CollectiveError: The first rank is dead.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> with rank_zero_first():
        ...     data = "downloaded, or found in the cache"
    """
    return BlockDecorator("rank_zero_first", functools.partial(_rank_zero_first, by_node=as_bool(local, "local")))


@contextmanager
def _rank_zero_first(*, by_node: bool) -> Iterator[None]:
    comm = comm_of(node_group() if by_node else None)
    with one_rank_first(comm, comm.call("rank_zero_first", {"local": by_node}), comm.ranks[0]):
        yield


@contextmanager
def one_rank_first(comm: Comm, call: Call, first: int | GroupRank) -> Iterator[None]:
    """Run a block on one member, `first`, and then on the others."""
    with call:
        owner = comm.group_rank_of(first, "rank")
        call.verify()
    section = ExclusiveSection(comm, call, owner)
    with section.reserved():
        if comm.rank == owner:
            with section.working():
                yield
        else:
            section.wait()
            yield


def in_rank_order() -> BlockDecorator:
    """Run a block on one rank after the other, in the order of ranks.

    Collective over the session. A context manager and a decorator. Every rank leaves the block when the last one has
    run it. The block must not call collectives.

    Raises:
        InvalidArgumentError: A coroutine or generator function is decorated; its body would run after the block.
        RemoteRankError: The block failed on another rank; the ranks after that one do not run it.
        CollectiveError: A rank is dead.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> with in_rank_order():
        ...     print("rank", get_rank())  # on 2 ranks: "rank 0", then "rank 1"
        rank 0
    """
    return BlockDecorator("in_rank_order", _in_rank_order)


@contextmanager
def _in_rank_order() -> Iterator[None]:
    comm = joined_session().comm
    with comm.call("in_rank_order") as call:
        call.verify()
    rank, last = call.rank, comm.size - 1
    # Each rank waits for the one before it, and at the end all wait for the last one. A rank that fails is reported by
    # the sections of all ranks after it, so that its error reaches every rank, including those before it.
    sections = [ExclusiveSection(comm, call, other, readers=last if other == last else 1) for other in range(comm.size)]
    with sections[rank].reserved(), sections[rank].working():
        if rank:
            sections[rank - 1].wait()
        yield
    if rank != last:
        sections[last].wait()
