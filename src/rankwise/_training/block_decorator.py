"""Decorators for functions, class methods and static methods; not for coroutines and generators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from rankwise.errors import InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")

# A call of these functions does not run their body.
_DEFERRED_KINDS: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


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
