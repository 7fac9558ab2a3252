"""Values from other ranks that are unpickled later: the thread of a rank alone may make tensors of its XLA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankwise.errors import PayloadTypeError


@dataclass(frozen=True, slots=True)
class Deferred:
    """A value from another rank that is not unpickled yet.

    Attributes:
        load: Unpickles it.
    """

    load: Callable[[], Any]


def undeferred(result: Any) -> Any:  # noqa: ANN401 - the result of a collective
    """Return a value, or values in a list, unpickled by this thread where that was deferred.

    Raises:
        PayloadTypeError: A value cannot be unpickled here.
    """
    if isinstance(result, list):
        return [undeferred(value) if isinstance(value, Deferred) else value for value in result]
    if not isinstance(result, Deferred):
        return result
    try:
        return result.load()
    except Exception as error:
        raise not_unpickled(error) from error


def not_unpickled(error: Exception) -> PayloadTypeError:
    """Return the error of a value that cannot be unpickled."""
    return PayloadTypeError(f"a value from another rank cannot be unpickled here: {error}")
