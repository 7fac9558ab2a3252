"""Reads of a store by thousands of ranks, which must not occupy the process that serves it.

That process looks again at all of a question with each part of it that arrives: so many keys are asked for some at a
time. And ranks that wait for a key ask for it again and again: in large jobs, each of them more rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch.distributed import Store

_KEYS_AT_ONCE: Final = 256
_PAUSE_SECONDS_A_RANK: Final = 2e-5


def longest_pause(seconds: float, num_ranks: int) -> float:
    """Return the longest pause between two reads of a rank that waits for a key.

    Args:
        seconds: That with few ranks.
        num_ranks: How many ranks may wait at the same time.
    """
    return seconds + _PAUSE_SECONDS_A_RANK * num_ranks


def are_written(store: Store, missing: list[str]) -> bool:
    """Remove the first keys from a list, as far as they are written, and return whether all are."""
    while missing and store.check(missing[:_KEYS_AT_ONCE]):
        del missing[:_KEYS_AT_ONCE]
    return not missing


def get_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that are written."""
    parts = (list(keys[first : first + _KEYS_AT_ONCE]) for first in range(0, len(keys), _KEYS_AT_ONCE))
    return [value for part in parts for value in store.multi_get(part)]
