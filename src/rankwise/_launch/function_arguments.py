"""The arguments of `rankwise.launch`: which keywords are its own, and which belong to the function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from rankwise.errors import InvalidArgumentError, shown

R = TypeVar("R")

# How alike an unknown keyword and one of `launch` have to be, for the first to be a typing error.
_ALIKE: Final = 0.8
_VARIED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def with_keywords(
    fn: Callable[..., R],
    args: Sequence[object],
    keywords: Mapping[str, object],
    *,
    more: Mapping[str, object] | None,
    own: Collection[str],
    given: Collection[str],
) -> Callable[..., R]:
    """Return a function with its keyword arguments, after the check that it can be called with all its arguments.

    Args:
        fn: The function.
        args: Its positional arguments.
        keywords: The keywords of the call that `launch` does not have.
        more: The argument `kwargs` of `launch`.
        own: The keywords that `launch` has.
        given: Those of them that the call has set.

    Raises:
        InvalidArgumentError: It is no function, or a keyword may be meant for either.
        TypeError: The function cannot be called with these arguments.
    """
    if not callable(fn):
        raise InvalidArgumentError(
            f"launch takes a function and its arguments, got {shown(fn)}: launch(train, 0.1), not launch(train(0.1))"
        )
    if more is not None and not isinstance(more, Mapping):
        raise InvalidArgumentError(f"kwargs={shown(more)} is not a dict of keyword arguments of the function")
    signature = _signature(fn)
    named = (
        [] if signature is None else [name for name, each in signature.parameters.items() if each.kind not in _VARIED]
    )
    for name in keywords:
        close = difflib.get_close_matches(name, own, 1, cutoff=_ALIKE)
        if close and name not in named:
            raise TypeError(
                f"launch() has no argument {name!r}: did you mean {close[0]!r}? One of the function with that name "
                f"goes into kwargs={{{name!r}: ...}}"
            )
        if more is not None and name in more:
            raise TypeError(f"{name!r} is given twice: as an argument, and in kwargs")
    together = {**keywords, **(more or {})}
    for name in given:
        # An argument that the function has got by its place, or in kwargs, is not meant.
        if name in named[len(args) :] and name not in together:
            raise InvalidArgumentError(
                f"{name}= is an argument of launch() and of {_name(fn)}(): the one of the function goes into "
                f"kwargs={{{name!r}: ...}}"
            )
    if signature is not None:
        try:
            signature.bind(*args, **together)
        except TypeError as error:
            raise TypeError(f"{_name(fn)}{signature} cannot be called with these arguments: {error}") from None
    return partial(fn, **together) if together else fn


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None if it is not known, as of some that are written in C."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
