"""Sequences with one value for each rank of a group, as `scatter` and `all_to_all` take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankwise._collectives.numpy_arrays import is_array
from rankwise._collectives.serialization import Serialized, serialize
from rankwise._comm.comm import INLINE_BYTES
from rankwise.errors import InvalidArgumentError


def serialize_each(values: object, size: int, operation: str, *, most_inline: int = INLINE_BYTES) -> list[Serialized]:
    """Serialize the values of a sequence, or the rows of a tensor or array: one for each member.

    Args:
        values: The sequence.
        size: The number of members.
        operation: The name of the collective, for the message.
        most_inline: The size in bytes up to which a value is in its header.

    Raises:
        InvalidArgumentError: The number of values is not the number of members.
        PayloadTypeError: A value cannot be pickled.
    """
    each = _listed(values)
    if each is None or len(each) != size:
        got = f"a {type(values).__qualname__}{'' if each is None else f' of {len(each)}'}"
        raise InvalidArgumentError(f"{operation} takes one value for each of {size} ranks, got {got}")
    return [serialize(value, most_inline=most_inline) for value in each]


def _listed(values: object) -> list[object] | None:
    """Return the values of a sequence, or the rows of a tensor or array; None for anything else."""
    if isinstance(values, Sequence):
        return None if isinstance(values, (str, bytes)) else list(values)
    if not isinstance(values, torch.Tensor) and not is_array(values):
        return None
    try:
        return list(values)  # type: ignore[call-overload, no-any-return]  # arrays have rows
    except (TypeError, ValueError, RuntimeError):  # for example, it has no dimensions or no contents
        return None
