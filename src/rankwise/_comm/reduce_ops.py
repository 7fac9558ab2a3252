"""The reduction operations, defined once for every transport: what travels, how it is reduced, what comes out."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown


class Op(Enum):
    """A reduction."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"

    @classmethod
    def parse(cls, name: str) -> Op:
        """Return the operation of that name.

        Raises:
            InvalidArgumentError: There is none.
        """
        found = _BY_NAME.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        close = difflib.get_close_matches(name.lower(), _BY_NAME, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidArgumentError(f"op={shown(name)} is none of {', '.join(map(repr, _BY_NAME))}{hint}")


_BY_NAME: Final = {op.value: op for op in Op}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRecipe:
    """How to reduce tensors of one type.

    Attributes:
        wire_dtype: The type they travel and are reduced in.
        wire_op: The reduction itself: SUM, PRODUCT, MIN or MAX.
        start: Makes a new contiguous tensor of that type to be reduced in place; of any number of elements.
        finish: Makes the result of what was reduced, given the number of ranks.
    """

    wire_dtype: torch.dtype
    wire_op: Op
    start: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor, int], torch.Tensor]

    @classmethod
    def of(
        cls, wire_dtype: torch.dtype, wire_op: Op, finish: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> ReductionRecipe:
        """Return the plan of a reduction whose type holds the values as they are."""

        def start(tensor: torch.Tensor) -> torch.Tensor:
            wire = torch.empty(tensor.shape, dtype=wire_dtype, device=tensor.device)
            return wire.copy_(tensor)

        return cls(wire_dtype=wire_dtype, wire_op=wire_op, start=start, finish=finish)


_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (*_HALVES, torch.float32, torch.float64)
_COMPLEX: Final = (torch.complex64, torch.complex128)
# Backends reduce these natively; the others travel in a type that holds them exactly.
_WORD_BITS: Final = 32
_LOW_WORD: Final = (1 << _WORD_BITS) - 1
# Below it, the upper word of a sum that floats of 64 bits hold exactly.
_EXACT_HIGH_WORD: Final = 1 << (53 - _WORD_BITS)
_WIDENED: Final = {torch.int16: torch.int32, torch.uint16: torch.int64, torch.uint32: torch.int64}


@functools.cache
def plan(dtype: torch.dtype, op: Op) -> ReductionRecipe:
    """Return how tensors of a type are reduced.

    The sum and product of bools are int64, as in torch. The mean of bools and integers is summed as an integer that
    does not overflow, and divided in float64; that of half-precision floats is taken in float32, where their sum does
    not overflow. All else keeps its type, and overflows as in torch: integers wrap around, floats become infinite.
    Not-a-number wins in a minimum or maximum, as it does in torch.

    Raises:
        PayloadTypeError: The operation is not defined for the type.
    """
    if dtype == torch.bool:
        return _plan_bool(op)
    if op in {Op.AND, Op.OR}:
        raise PayloadTypeError(f"op={op.value!r} is for bools, got {dtype}; compare first, as in tensor != 0")
    if dtype in _COMPLEX:
        if op in {Op.MIN, Op.MAX}:
            raise PayloadTypeError(f"op={op.value!r} is not defined for {dtype}: complex numbers have no order")
    elif dtype not in (*_INTEGERS, *_FLOATS, *_WIDENED):
        raise PayloadTypeError(f"op={op.value!r} is not defined for {dtype}; convert it, as in tensor.float()")

    if op is Op.MEAN:
        if dtype == torch.int64:
            return ReductionRecipe(wire_dtype=dtype, wire_op=Op.SUM, start=_split_words, finish=_mean_of_words)
        if dtype in (*_INTEGERS, *_WIDENED):
            return ReductionRecipe.of(torch.int64, Op.SUM, lambda total, size: total.double() / size)
        wire = torch.float32 if dtype in _HALVES else dtype
        return ReductionRecipe.of(wire, Op.SUM, lambda total, size: (total / size).to(dtype))
    if op in {Op.MIN, Op.MAX} and dtype in _FLOATS:
        return _plan_order(dtype, op)
    return ReductionRecipe.of(_WIDENED.get(dtype, dtype), op, lambda result, _: result.to(dtype))


def require_differentiable(tensor: torch.Tensor) -> None:
    """Check that gradients can flow through collectives to a tensor: they are added up over the ranks.

    Raises:
        PayloadTypeError: It is not of floats or complex numbers, or of a type that has no sum, as floats of 8 bits; or
            it carries a tangent of forward-mode differentiation.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise PayloadTypeError(f"gradients flow through tensors of floats, got {tensor.dtype}")
    plan(tensor.dtype, Op.SUM)
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise PayloadTypeError("forward-mode differentiation does not go through collectives; use backward()")


def fold(parts: Sequence[torch.Tensor], op: Op, *, out: torch.Tensor) -> torch.Tensor:
    """Reduce tensors as they travel, in their order, into another of their kind; not of Op.MEAN, AND or OR.

    Takes no memory: this is done between the moves of data, where no rank can fail alone. `out` may be the first part.
    """
    out.copy_(parts[0])
    for part in parts[1:]:
        if op is Op.SUM:
            out += part
        elif op is Op.PRODUCT:
            out *= part
        else:
            (torch.minimum if op is Op.MIN else torch.maximum)(out, part, out=out)
    return out


def _split_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the upper and the lower words of 64-bit integers, which can be summed over many ranks each."""
    return torch.stack([tensor >> _WORD_BITS, tensor & _LOW_WORD])


def _mean_of_words(sums: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean in float64: the nearest one where the sum has 53 bits, and within a unit in the last place else.

    The whole part of the mean always fits into 64 bits: the upper words are divided first, and what is left of them is
    divided with the lower ones.
    """
    high, low = sums.reshape(2, sums.numel() // 2)
    upper = high.div(size, rounding_mode="floor")
    rest = ((high - upper * size) << _WORD_BITS) + low
    lower = rest.div(size, rounding_mode="floor")
    mean = ((upper << _WORD_BITS) + lower).double() + (rest - lower * size).double() / size
    is_exact = (high >= -_EXACT_HIGH_WORD) & (high < _EXACT_HIGH_WORD - (low >> _WORD_BITS))
    return torch.where(is_exact, ((high << _WORD_BITS) + low).double() / size, mean)


def _plan_bool(op: Op) -> ReductionRecipe:
    if op in {Op.AND, Op.MIN}:
        return ReductionRecipe.of(torch.uint8, Op.MIN, lambda result, _: result.bool())
    if op in {Op.OR, Op.MAX}:
        return ReductionRecipe.of(torch.uint8, Op.MAX, lambda result, _: result.bool())
    if op is Op.MEAN:
        return ReductionRecipe.of(torch.int64, Op.SUM, lambda total, size: total.double() / size)
    return ReductionRecipe.of(torch.int64, op, lambda result, _: result)


def _plan_order(dtype: torch.dtype, op: Op) -> ReductionRecipe:
    """Plan the minimum or maximum of floats: backends lose not-a-number, and do so on some ranks only.

    So floats travel as integers of the same order, in which not-a-number is beyond infinity.
    """
    wide, whole = (torch.float64, torch.int64) if dtype is torch.float64 else (torch.float32, torch.int32)
    limits = torch.iinfo(whole)
    beyond = limits.min if op is Op.MIN else limits.max

    def reorder(bits: torch.Tensor) -> torch.Tensor:
        # Negative floats are ordered the other way round; this is its own inverse.
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    def start(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.to(wide).contiguous()
        return reorder(values.view(whole)).masked_fill_(values.isnan(), beyond)

    return ReductionRecipe(
        wire_dtype=whole, wire_op=op, start=start, finish=lambda result, _: reorder(result).view(wide).to(dtype)
    )
