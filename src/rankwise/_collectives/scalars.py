"""Python numbers, reduced exactly as Python does, and the same on every rank."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from rankwise._comm.group import Comm
from rankwise._comm.reduce_ops import Op
from rankwise.errors import PayloadTypeError, shown

Number = bool | int | float | complex

# From the narrowest to the widest.
_KINDS: Final = (bool, int, float, complex)
_DTYPES: Final = (torch.bool, torch.int64, torch.float64, torch.complex128)
_INT64_BITS: Final = 63


def check_number(value: Any, op: Op) -> Any:  # noqa: ANN401 - any value of the user's
    """Return a number as Python's, if an operation is defined for it. numpy's overflow, and have a bool of their own.

    Raises:
        PayloadTypeError: The operation is not defined for it, or it is no number.
    """
    kind = type(value)
    if kind is float and not op.bools_only:
        return value
    if kind not in _KINDS:
        value = _as_python(value)
    if op.bools_only and not isinstance(value, bool):
        raise PayloadTypeError(f"op={op.name!r} is for bools, got {shown(value)}; compare first, as in value != 0")
    if op.is_mean and isinstance(value, int) and abs(value) > sys.float_info.max:
        raise PayloadTypeError("op='mean' of an integer beyond all floats has no result, for means are floats")
    if op.absorbing is not None and isinstance(value, complex):
        raise PayloadTypeError(f"op={op.name!r} is not defined for {shown(value)}: complex numbers have no order")
    return value


def fold_numbers(rows: Sequence[Sequence[Number]], op: Op) -> list[Any]:
    """Reduce the numbers of all ranks, a row each, in the order of ranks."""
    return [_fold(column, op) for column in zip(*rows, strict=True)]


def reduce_numbers(comm: Comm, numbers: Sequence[Number], op: Op) -> Callable[[], list[Any]]:
    """Reduce numbers among many ranks, at a cost that does not grow with them, and return what gives the results.

    Collective over the members. Only where whole numbers might not fit into 64 bits are they gathered; what is returned
    then folds them, and raises on all ranks alike where they have no result.
    """
    bits = max((number.bit_length() for number in numbers if isinstance(number, int)), default=0)
    widest = torch.tensor([bits, *(_KINDS.index(type(number)) for number in numbers)], device=comm.control_device)
    comm.reduce(widest, Op.MAX)()
    bits, *kinds = widest.tolist()
    if op.result_bits(bits, comm.size) >= _INT64_BITS:
        rows = [pickle.loads(row) for row in comm.all_gather_unverified(pickle.dumps(numbers))]
        return functools.partial(fold_numbers, rows, op)

    results: list[Any] = [None] * len(numbers)
    for kind in sorted(set(kinds)):
        places = [place for place, other in enumerate(kinds) if other == kind]
        widen: Callable[[Any], Any] = _KINDS[kind]
        values = [widen(numbers[place]) for place in places]
        wire = torch.tensor(values, dtype=_DTYPES[kind], device=comm.control_device)
        reduced = comm.all_reduce(wire, Op.SUM if op.is_mean else op)()().tolist()
        for place, value in zip(places, reduced, strict=True):
            results[place] = value / comm.size if op.is_mean else value
    return lambda: results


def _as_python(value: Any) -> Any:  # noqa: ANN401 - any value of the user's
    """Return numpy's numbers, and numbers of types made from Python's, as Python's own."""
    own = type(value)
    if hasattr(own, "item") and hasattr(own, "ndim") and not value.ndim:
        value = value.item()
    kind = next((kind for kind in _KINDS if isinstance(value, kind)), None)
    if kind is None:
        raise PayloadTypeError(
            f"all_reduce takes tensors, numbers, arrays and containers of them, got a {own.__qualname__}"
        )
    return kind(value)


def _fold(column: Sequence[Any], op: Op) -> Any:  # noqa: ANN401 - numbers of any type
    kinds = set(map(type, column))
    if len(kinds) > 1:
        widest = max(kinds, key=_KINDS.index)
        try:
            column = [widest(number) for number in column]
        except OverflowError as error:  # on all ranks alike
            raise PayloadTypeError(
                "an integer of one rank is beyond all floats, and another rank has a float"
            ) from error
    return op.reduce_numbers(column)
