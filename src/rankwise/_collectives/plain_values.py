"""Short values of Python's own types, such as the metrics of a step: a pickle of them needs nothing beside it.

They are sent often, and take a fraction of the time of any other value.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

from rankwise._restricted_pickles import plain_loads

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_MOST_SCALARS: Final = 64


def is_plain(value: Any) -> bool:  # noqa: ANN401 - any value of the user's
    """Return whether a value is one of Python's scalars, or a short dict, list or tuple of them."""
    kind = type(value)
    if kind is dict:
        return len(value) <= _MOST_SCALARS and _SCALARS.issuperset(map(type, (*value, *value.values())))
    if kind is list or kind is tuple:
        return len(value) <= _MOST_SCALARS and _SCALARS.issuperset(map(type, value))
    return kind in _SCALARS


def plain_pickle(value: object) -> bytes:
    """Return the pickle of a plain value."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def read_plain(pickled: bytes, *, safe: bool) -> Any:  # noqa: ANN401 - a plain value, if the sender means no harm
    """Return the value of such a pickle.

    Args:
        pickled: The pickle.
        safe: Refuse one that refers to any definition.
    """
    return plain_loads(pickled) if safe else pickle.loads(pickled)
