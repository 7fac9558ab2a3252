"""What is shown or logged once and not on each rank: `print`, `progress`, and objects that exist on rank zero alone.

Nothing here communicates.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sized
from importlib.util import find_spec
from typing import NoReturn, ParamSpec, Self, TextIO, TypeVar, cast

from rankwise._session.getters import is_rank_zero
from rankwise.errors import InvalidArgumentError, shown

P = ParamSpec("P")
T = TypeVar("T")


def print(  # noqa: A001 - as the builtin, on one rank
    *values: object, sep: str | None = " ", end: str | None = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print values on rank zero, and nothing on other ranks.

    Local. Before `init()` too. `from rankwise import *` puts it in the place of the builtin.

    Args:
        *values, sep, end, file, flush: Those of the builtin `print`.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> import rankwise
        >>> rankwise.print("loss", 0.25)
        loss 0.25
    """
    if is_rank_zero():
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)


def progress(iterable: Iterable[T], description: str = "", *, total: int | None = None) -> Iterator[T]:
    """Return an iterator with a progress bar on rank zero; on other ranks, one without.

    Local. The bar is that of tqdm, or of rich if tqdm is not installed; if neither is, there is none.

    Args:
        iterable: What is iterated over.
        description: A text in front of the bar.
        total: The number of elements; that of `len(iterable)` by default, if it has one.

    Raises:
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> [batch for batch in progress([1, 2], "epoch 1")]
        [1, 2]
    """
    if not is_rank_zero():
        return iter(iterable)
    if total is None and isinstance(iterable, Sized):
        try:
            total = len(iterable)
        except TypeError:  # as of a DataLoader over an IterableDataset
            total = None
    if find_spec("tqdm") is not None:
        from tqdm import tqdm  # noqa: PLC0415 - optional

        return iter(tqdm(iterable, desc=description or None, total=total))
    if find_spec("rich") is not None:
        from rich.progress import track  # noqa: PLC0415 - optional

        return iter(track(iterable, description, total=total))
    return iter(iterable)


def on_rank_zero(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return an object on rank zero, and on other ranks one that does nothing: for loggers, such as a SummaryWriter.

    Local: if the object cannot be made, rank zero alone raises. On other ranks every method takes all arguments and
    returns None; every attribute is such an object again; items and attributes can be set and deleted; and `with`
    works. There it cannot be iterated over, counted, compared or computed with, which is a TypeError, since the ranks
    would differ. So use it for what takes numbers and returns nothing, and do not call collectives in its methods.

    Args:
        make: The class or function that makes the object, on rank zero.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        InvalidArgumentError: `make` cannot be called.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> names = on_rank_zero(list, "ab")
        >>> names.append("c")
    """
    if not callable(make):
        raise InvalidArgumentError(f"on_rank_zero takes a class or function and its arguments, got {shown(make)}")
    return make(*args, **kwargs) if is_rank_zero() else cast(T, _Nothing(_name(make)))  # a stand-in


def _name(make: object) -> str:
    return getattr(make, "__qualname__", type(make).__qualname__)


class _Nothing:
    """An object of rank zero, on another rank."""

    __slots__ = ("_name",)
    _name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __repr__(self) -> str:
        return f"<{self._name} on rank zero only>"

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):  # protocols of Python, numpy and torch
            raise AttributeError(f"{self!r} has no {name}", name=name, obj=self)
        return _Nothing(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        """Do nothing."""

    def __delattr__(self, name: str) -> None:
        """Do nothing."""

    def __getitem__(self, key: object) -> _Nothing:
        return _Nothing(f"{self._name}[{key!r}]")

    def __setitem__(self, key: object, value: object) -> None:
        """Do nothing."""

    def __delitem__(self, key: object) -> None:
        """Do nothing."""

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be iterated over: the ranks would differ; for a bar, use rankwise.progress()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""
