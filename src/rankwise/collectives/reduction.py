"""Collectives that reduce: all_reduce, reduce_scatter. For tensors and Python numbers."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from rankwise.collectives.groups import comm_of
from rankwise.collectives.payload import Header, Payload, agreed, header_of
from rankwise.comm.comm import Comm
from rankwise.comm.ops import Op
from rankwise.errors import PayloadTypeError

N = TypeVar("N", int, float, complex)


@overload
def all_reduce(value: torch.Tensor, op: str = "sum", *, group: Comm | None = None) -> torch.Tensor: ...
@overload
def all_reduce(value: N, op: str = "sum", *, group: Comm | None = None) -> N | float: ...
def all_reduce(value: Any, op: str = "sum", *, group: Comm | None = None) -> Any:
    """Return the reduction of every rank's value, the same on all ranks.

    Collective over the session, or over `group`. Tensors have the same shape and type on all ranks; the result is new,
    detached, on the tensor's device, and of its type, but for bools (their sum and product are int64) and the mean of
    integers (float64). Python numbers are reduced exactly, as Python does, and need not be of one type: the mean of
    integers is a float. That tensors differ in shape or type between ranks is not noticed: torch hangs, aborts, or
    gives wrong results then.

    Args:
        value: A tensor or a number.
        op: "sum", "mean", "product", "min", "max"; "and", "or" for bools.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: There is no such op.
        PayloadTypeError: The op is not defined for the value, or the value is neither a tensor nor a number.
        CollectiveError: A rank died, or did not take part within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise
        >>> rankwise.all_reduce(3), rankwise.all_reduce(3, op="mean"), rankwise.all_reduce(True, op="and")
        (3, 3.0, True)
    """
    parsed, comm = Op.parse(op), comm_of(group)
    if isinstance(value, torch.Tensor):
        return comm.all_reduce(value, parsed)
    packed = _attempt(value, parsed)
    headers = [Header.decode(message) for message in comm.exchange(header_of(packed).encode())]
    agreed(packed, headers, comm.ranks)
    return _fold([header.number for header in headers], parsed)


def reduce_scatter(values: Sequence[torch.Tensor], op: str = "sum", *, group: Comm | None = None) -> torch.Tensor:
    """Return the reduction of every rank's value for this rank.

    Collective over the session, or over `group`. The result is as that of `all_reduce`.

    Args:
        values: One tensor for each member, in the order of ranks; of one type, and of the same shapes on all ranks.
        op: As for `all_reduce`.
        group: Those who take part; all, by default.

    Raises:
        InvalidArgumentError: There is no such op, or not one tensor for each member.
        PayloadTypeError: The op is not defined for the type, or the types differ.
        CollectiveError: A rank died, or did not take part within the session's timeout.
        NotJoinedError: The world is larger than one and nobody joined it.

    Example:
        >>> import rankwise, torch
        >>> rankwise.reduce_scatter([torch.tensor([1, 2])])
        tensor([1, 2])
    """
    parsed, comm = Op.parse(op), comm_of(group)
    if isinstance(values, torch.Tensor) or not all(isinstance(value, torch.Tensor) for value in values):
        raise PayloadTypeError(
            "reduce_scatter takes a sequence of tensors, one for each rank, as in tensor.chunk(world)"
        )
    return comm.reduce_scatter(values, parsed)


def _attempt(value: Any, op: Op) -> Payload | PayloadTypeError:  # noqa: ANN401 - any value of the user's
    """Make a number ready to travel, or return the error that the other ranks must hear of first."""
    if not isinstance(value, (int, float, complex)) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy's own numbers overflow and have their own bool
    try:
        _check_number(value, op)
    except PayloadTypeError as error:
        return error
    return Payload(Header(number=value), torch.empty(0, dtype=torch.uint8))


def _check_number(value: object, op: Op) -> None:
    """Check that an operation is defined for a number."""
    if not isinstance(value, numbers.Number):
        raise PayloadTypeError(f"all_reduce takes tensors and numbers, got a {type(value).__qualname__}")
    if op in {Op.AND, Op.OR} and not isinstance(value, bool):
        raise PayloadTypeError(f"op={op.value!r} is for bools, got {value!r}; compare first, as in value != 0")
    if op in {Op.MIN, Op.MAX} and isinstance(value, complex):
        raise PayloadTypeError(f"op={op.value!r} is not defined for {value!r}: complex numbers have no order")


def _fold(values: Sequence[Any], op: Op) -> Any:  # noqa: ANN401 - numbers of any type
    """Reduce numbers as Python does, in the order of ranks, so that every rank gets the same."""
    if op is Op.SUM:
        return functools.reduce(operator.add, values, 0)
    if op is Op.MEAN:
        return functools.reduce(operator.add, values, 0) / len(values)
    if op is Op.PRODUCT:
        return math.prod(values)
    if op is Op.MIN:
        return functools.reduce(_least, values)
    if op is Op.MAX:
        return functools.reduce(_greatest, values)
    return all(values) if op is Op.AND else any(values)


def _least(a: Any, b: Any) -> Any:  # noqa: ANN401 - numbers of any type
    """The smaller one; not-a-number wins, as it does in torch."""
    return a if a != a or a <= b else b  # noqa: PLR0124 - only not-a-number differs from itself


def _greatest(a: Any, b: Any) -> Any:  # noqa: ANN401 - numbers of any type
    return a if a != a or a >= b else b  # noqa: PLR0124 - only not-a-number differs from itself
