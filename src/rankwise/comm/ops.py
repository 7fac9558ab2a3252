"""The reduction operations, defined once for every transport: what travels, how it is reduced, what comes out."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from rankwise.errors import InvalidArgumentError, PayloadTypeError


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
        try:
            return cls(name)
        except ValueError:
            names = [op.value for op in cls]
            close = difflib.get_close_matches(str(name).lower(), names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgumentError(f"op={name!r} is none of {', '.join(map(repr, names))}{hint}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to reduce tensors of one type.

    Attributes:
        wire_dtype: The type they travel and are reduced in.
        wire_op: The reduction itself: SUM, PRODUCT, MIN or MAX.
        finish: Makes the result of what was reduced, given the number of ranks.
    """

    wire_dtype: torch.dtype
    wire_op: Op
    finish: Callable[[torch.Tensor, int], torch.Tensor]


_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (*_HALVES, torch.float32, torch.float64)
_COMPLEX: Final = (torch.complex64, torch.complex128)
# Backends reduce these natively; the others travel in a type that holds them exactly.
_WIDENED: Final = {torch.int16: torch.int32, torch.uint16: torch.int64, torch.uint32: torch.int64}


def plan(dtype: torch.dtype, op: Op) -> Plan:
    """Return how tensors of a type are reduced.

    The sum and product of bools are int64, as in torch. The mean of bools and integers is summed in int64 and divided
    in float64; that of half-precision floats is taken in float32, where their sum does not overflow. All else keeps
    its type.

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
        if dtype in (*_INTEGERS, *_WIDENED):
            return Plan(wire_dtype=torch.int64, wire_op=Op.SUM, finish=lambda total, size: total.double() / size)
        wire = torch.float32 if dtype in _HALVES else dtype
        return Plan(wire_dtype=wire, wire_op=Op.SUM, finish=lambda total, size: (total / size).to(dtype))
    return Plan(wire_dtype=_WIDENED.get(dtype, dtype), wire_op=op, finish=lambda result, _: result.to(dtype))


def _plan_bool(op: Op) -> Plan:
    if op in {Op.AND, Op.MIN}:
        return Plan(wire_dtype=torch.uint8, wire_op=Op.MIN, finish=lambda result, _: result.bool())
    if op in {Op.OR, Op.MAX}:
        return Plan(wire_dtype=torch.uint8, wire_op=Op.MAX, finish=lambda result, _: result.bool())
    if op is Op.MEAN:
        return Plan(wire_dtype=torch.int64, wire_op=Op.SUM, finish=lambda total, size: total.double() / size)
    return Plan(wire_dtype=torch.int64, wire_op=op, finish=lambda result, _: result)
