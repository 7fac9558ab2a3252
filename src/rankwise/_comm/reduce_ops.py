"""The reduction operations, each defined once for every transport, and the wire format of the tensors that they reduce.

A tensor is converted to its wire format, reduced there by one of the transports, and converted to the result.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from rankwise._xla_use import DEVICE_TYPE
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

# What torch, NCCL and numpy call the operations.
_OTHER_NAMES: Final = {"any": "or", "all": "and", "avg": "mean", "average": "mean", "prod": "product", "add": "sum"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """A reduction operation: everything in the package that depends on the operation is an attribute of its entry.

    A new operation is a new entry in the table below.

    Attributes:
        name: The name that users pass as `op`.
        torch_op: The operation of torch's process group, on tensors in their wire format (see `plan`).
        combine: Reduces two tensors in wire format, into `out`, which may be one of them.
        reduce_copies: Replaces a tensor in wire format, in place, by the reduction of n copies of it (for fake groups).
        reduce_numbers: Reduces Python numbers of one type, in the order of ranks.
        absorbing: For a minimum or maximum, returns the integer of a type that wins against all others. None for an
            operation whose result is not one of its operands.
        is_mean: The result is divided by the number of ranks, after the reduction in wire format.
        bools_only: The operation is defined for bools alone.
        is_linear: Complex tensors are reduced as their real and imaginary parts, and gradients can flow through it.
    """

    SUM: ClassVar[Op]
    MEAN: ClassVar[Op]
    PRODUCT: ClassVar[Op]
    MIN: ClassVar[Op]
    MAX: ClassVar[Op]
    AND: ClassVar[Op]
    OR: ClassVar[Op]

    name: str
    torch_op: dist.ReduceOp.RedOpType
    combine: Callable[..., torch.Tensor]
    reduce_copies: Callable[[torch.Tensor, int], object]
    reduce_numbers: Callable[[Sequence[Any]], Any]
    absorbing: Callable[[torch.iinfo], int] | None = None
    is_mean: bool = False
    bools_only: bool = False
    is_linear: bool = False

    def __repr__(self) -> str:
        return f"Op.{self.name.upper()}"

    @classmethod
    def parse(cls, name: str) -> Op:
        """Return the operation of that name.

        Raises:
            InvalidArgumentError: No operation has that name.
        """
        found = OPS.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        text = name.name if isinstance(name, dist.ReduceOp.RedOpType) else name if isinstance(name, str) else ""
        text = text.lower()
        close = difflib.get_close_matches(text, OPS, n=1)
        meant = _OTHER_NAMES.get(text, *close[:1])
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise InvalidArgumentError(f"op={shown(name)} is none of {', '.join(map(repr, OPS))}{hint}")


def _lesser(a: Any, b: Any) -> Any:  # noqa: ANN401 - numbers of any type
    """Return the lesser number; not-a-number wins, as it does in torch."""
    return a if a != a or a <= b else b  # noqa: PLR0124 - only not-a-number differs from itself


def _greater(a: Any, b: Any) -> Any:  # noqa: ANN401 - numbers of any type
    """Return the greater number; not-a-number wins, as it does in torch."""
    return a if a != a or a >= b else b  # noqa: PLR0124 - only not-a-number differs from itself


Op.SUM = Op(
    name="sum",
    torch_op=dist.ReduceOp.SUM,
    combine=torch.add,
    reduce_copies=torch.Tensor.mul_,
    reduce_numbers=sum,
    is_linear=True,
)
Op.MEAN = replace(Op.SUM, name="mean", reduce_numbers=lambda numbers: sum(numbers) / len(numbers), is_mean=True)
Op.PRODUCT = Op(
    name="product",
    torch_op=dist.ReduceOp.PRODUCT,
    combine=torch.mul,
    reduce_copies=torch.Tensor.pow_,
    reduce_numbers=math.prod,
)
Op.MIN = Op(
    name="min",
    torch_op=dist.ReduceOp.MIN,
    combine=torch.minimum,
    reduce_copies=lambda tensor, _: tensor,
    reduce_numbers=functools.partial(functools.reduce, _lesser),
    absorbing=lambda limits: limits.min,
)
Op.MAX = Op(
    name="max",
    torch_op=dist.ReduceOp.MAX,
    combine=torch.maximum,
    reduce_copies=lambda tensor, _: tensor,
    reduce_numbers=functools.partial(functools.reduce, _greater),
    absorbing=lambda limits: limits.max,
)
# Bools travel as 0 and 1.
Op.AND = replace(Op.MIN, name="and", reduce_numbers=all, bools_only=True)
Op.OR = replace(Op.MAX, name="or", reduce_numbers=any, bools_only=True)

OPS: Final = {op.name: op for op in (Op.SUM, Op.MEAN, Op.PRODUCT, Op.MIN, Op.MAX, Op.AND, Op.OR)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRecipe:
    """How to reduce tensors of one dtype.

    Attributes:
        wire_dtype: The dtype in which they are sent and reduced.
        start: Converts a tensor to a new contiguous one in wire format, to be reduced in place; it may have any number
            of elements, and be on the CPU.
        finish: Converts the reduced tensor to the result, given the number of ranks. It may be on the CPU, and may
            change the reduced tensor or return it, so it is called once.
    """

    wire_dtype: torch.dtype
    start: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor, int], torch.Tensor]

    @classmethod
    def of(cls, wire_dtype: torch.dtype, finish: Callable[[torch.Tensor, int], torch.Tensor]) -> ReductionRecipe:
        """Return the recipe for a wire format that is only another dtype."""

        def start(tensor: torch.Tensor) -> torch.Tensor:
            if wire_dtype.is_complex:
                tensor = _off_xla(tensor)
            wire = torch.empty(tensor.shape, dtype=wire_dtype, device=tensor.device)
            return wire.copy_(tensor)

        return cls(wire_dtype=wire_dtype, start=start, finish=finish)


_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES: Final = (torch.float16, torch.bfloat16)
_FLOATS: Final = (*HALVES, torch.float32, torch.float64)
_COMPLEX: Final = (torch.complex64, torch.complex128)
_WORD_BITS: Final = 32
_LOW_WORD: Final = (1 << _WORD_BITS) - 1
# The upper word of a sum is below this where float64 holds the sum exactly.
_EXACT_HIGH_WORD: Final = 1 << (53 - _WORD_BITS)
# No backend reduces these dtypes natively: they are sent in one that holds them exactly.
_WIDENED: Final = {torch.int16: torch.int32, torch.uint16: torch.int64, torch.uint32: torch.int64}
# What keeps the values of other dtypes; quantized tensors and 8-bit floats become floats.
_REMEDIES: Final = {
    torch.uint64: "tensor.to(torch.int64), which holds values below 2 to the power of 63",
    torch.complex32: "tensor.to(torch.complex64)",
}


@functools.cache
def plan(dtype: torch.dtype, op: Op) -> ReductionRecipe:
    """Return the recipe for tensors of a dtype.

    The sum and product of bools are int64, as in torch. The mean of bools and integers is summed as an integer that
    does not overflow, and divided in float64; that of half-precision floats is taken in float32, where their sum does
    not overflow. All else keeps its dtype, and overflows as in torch: integers wrap around, floats become infinite.
    Not-a-number wins in a minimum or maximum, as it does in torch.

    Raises:
        PayloadTypeError: The operation is not defined for the dtype.
    """
    if dtype == torch.bool:
        return _plan_bool(op)
    if op.bools_only:
        raise PayloadTypeError(f"op={op.name!r} is for bools, got {dtype}; compare first, as in tensor != 0")
    if dtype in _COMPLEX:
        if op.absorbing is not None:
            raise PayloadTypeError(f"op={op.name!r} is not defined for {dtype}: complex numbers have no order")
    elif dtype not in (*_INTEGERS, *_FLOATS, *_WIDENED):
        remedy = _REMEDIES.get(dtype, "tensor.float()")
        raise PayloadTypeError(f"op={op.name!r} is not defined for {dtype}; convert it, as in {remedy}")

    if op.is_mean:
        if dtype == torch.int64:
            return ReductionRecipe(wire_dtype=dtype, start=_split_words, finish=_mean_of_words)
        if dtype in (*_INTEGERS, *_WIDENED):
            return ReductionRecipe.of(torch.int64, _mean_of_integers)
        wire = torch.float32 if dtype in HALVES else dtype
        return ReductionRecipe.of(wire, lambda total, size: total.div_(size).to(dtype))
    if op.absorbing is not None and dtype in _FLOATS:
        return _plan_order(dtype, op.absorbing)
    return ReductionRecipe.of(_WIDENED.get(dtype, dtype), lambda result, _: result.to(dtype))


def require_differentiable(tensor: torch.Tensor) -> None:
    """Check that gradients can flow through collectives to a tensor: gradients are summed over the ranks.

    Raises:
        PayloadTypeError: The dtype is not floating point or complex, or has no sum, as 8-bit floats; or the tensor
            carries a tangent of forward-mode differentiation.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise PayloadTypeError(f"gradients flow through tensors of floats, got {tensor.dtype}")
    plan(tensor.dtype, Op.SUM)
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise PayloadTypeError("forward-mode differentiation does not go through collectives; use backward()")


def fold(parts: Sequence[torch.Tensor], op: Op, *, out: torch.Tensor) -> torch.Tensor:
    """Reduce tensors in wire format, in the order of ranks, into `out`, which has their dtype and shape.

    Every rank that folds the same parts gets the same bits, in every run: addition of floats is not associative, so the
    order must not depend on the order of arrival. Allocates no memory, since it runs while data is transferred, where
    no rank may fail alone. `out` may be the first part.
    """
    if len(parts) == 1:
        return out.copy_(parts[0])
    op.combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        op.combine(out, part, out=out)
    return out


def _off_xla(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device with exact 64-bit integers and views of complex numbers: XLA has neither."""
    return tensor.cpu() if tensor.device.type == DEVICE_TYPE else tensor


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: those of Apple and some of Intel do not."""
    if device.type in {"cpu", DEVICE_TYPE}:
        return True
    try:
        torch.ones(1, dtype=torch.float64, device=device).div_(2)
    except (TypeError, RuntimeError):
        return False
    return True


def _in_float64(
    mean: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return a mean that is computed in float64 on the CPU, and rounded to float32, where the device has no float64."""

    @functools.wraps(mean)
    def computed(total: torch.Tensor, size: int) -> torch.Tensor:
        if has_float64(total.device):
            return mean(total, size)
        return mean(total.cpu(), size).float().to(total.device)

    return computed


@_in_float64
def _mean_of_integers(total: torch.Tensor, size: int) -> torch.Tensor:
    return total.double().div_(size)


def _split_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the upper and the lower words of 64-bit integers: sums of either do not overflow, over many ranks."""
    tensor = _off_xla(tensor)
    return torch.stack([tensor >> _WORD_BITS, tensor & _LOW_WORD])


@_in_float64
def _mean_of_words(sums: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean in float64: the nearest one if the sum has at most 53 bits, else within a unit in the last place.

    The whole part of the mean always fits into 64 bits: the upper words are divided first, and the remainder of that
    division is divided together with the lower words.
    """
    high, low = sums.reshape(2, sums.numel() // 2)
    upper = high.div(size, rounding_mode="floor")
    rest = ((high - upper * size) << _WORD_BITS) + low
    lower = rest.div(size, rounding_mode="floor")
    mean = ((upper << _WORD_BITS) + lower).double() + (rest - lower * size).double() / size
    is_exact = (high >= -_EXACT_HIGH_WORD) & (high < _EXACT_HIGH_WORD - (low >> _WORD_BITS))
    return torch.where(is_exact, ((high << _WORD_BITS) + low).double() / size, mean)


def _plan_bool(op: Op) -> ReductionRecipe:
    if op.absorbing is not None:
        return ReductionRecipe.of(torch.uint8, lambda result, _: result.bool())
    if op.is_mean:
        return ReductionRecipe.of(torch.int64, _mean_of_integers)
    return ReductionRecipe.of(torch.int64, lambda result, _: result)


def _plan_order(dtype: torch.dtype, absorbing: Callable[[torch.iinfo], int]) -> ReductionRecipe:
    """Return the recipe for the minimum or maximum of floats.

    Backends drop not-a-number, and do so on some ranks only. So floats are sent as integers of the same order, in which
    not-a-number is beyond infinity.
    """
    wide, integers = (torch.float64, torch.int64) if dtype is torch.float64 else (torch.float32, torch.int32)
    limits = torch.iinfo(integers)
    not_a_number = absorbing(limits)

    def reorder(bits: torch.Tensor) -> torch.Tensor:
        # Negative floats are ordered the other way round; this is its own inverse.
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    def start(tensor: torch.Tensor) -> torch.Tensor:
        values = _off_xla(tensor).to(wide).contiguous()
        return reorder(values.view(integers)).masked_fill_(values.isnan(), not_a_number)

    return ReductionRecipe(
        wire_dtype=integers, start=start, finish=lambda result, _: reorder(result).view(wide).to(dtype)
    )
