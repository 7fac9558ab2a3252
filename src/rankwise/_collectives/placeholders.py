"""What a receiver passes to broadcast or scatter, compared with what it gets.

The value is ignored, and usually it is None. Where it has tensors, the program means to fill them: then something else
has arrived if another broadcast of the sender has met this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from rankwise.errors import MismatchError

_KINDS: Final = ((Mapping, "dicts"), ((list, tuple), "lists"))


def check_received(passed: object, received: object, call: str) -> None:
    """Compare a value that was passed, if it has tensors, with the one that has arrived.

    The numbers of tensors and the kinds of containers around them have to be equal; shapes, dtypes and keys need not.

    Args:
        passed: What this rank has passed.
        received: What it got.
        call: The call, for the error.

    Raises:
        MismatchError: They differ.
    """
    wanted = _tensors_in(passed)
    if wanted != "no tensor" and (found := _tensors_in(received)) != wanted:
        raise MismatchError(
            f"{call} was given {wanted} on this rank, and has received {found}: another call of the sender has met "
            "this one, or the ranks have different models; pass None where the value is not known"
        )


def _tensors_in(value: object) -> str:
    """Return the number of tensors in a value, and the kinds of the containers around them, as text."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    count, kinds, seen = 0, set[str](), set[int]()
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        kind = next((name for types, name in _KINDS if isinstance(one, types)), "")
        if not kind or id(one) in seen:
            continue
        seen.add(id(one))
        children = list(one.values() if isinstance(one, Mapping) else one)
        tensors = sum(isinstance(child, torch.Tensor) for child in children)
        if tensors:
            kinds.add(kind)
        count += tensors
        waiting += children
    return f"{count} tensor{'s' * (count > 1)} in {' and '.join(sorted(kinds))}" if count else "no tensor"
