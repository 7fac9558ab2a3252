"""Weights of means: the mean over samples or tokens, of which the ranks have different numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from rankwise._collectives.numpy_arrays import array_from_tensor, is_array, tensor_from_array
from rankwise._collectives.pytree import PyTree, describe
from rankwise._collectives.scalars import to_python_number
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import HALVES, Op, has_float64, plan, require_differentiable
from rankwise.errors import InvalidArgumentError, PayloadTypeError, shown

# A number of at least 0, also in a tensor without dimensions.
Weight: TypeAlias = float | torch.Tensor


def checked_weight(weight: object, op: Op) -> float:
    """Return a weight as a Python number.

    Raises:
        InvalidArgumentError: It is not a finite number of at least 0, or the operation is not a mean.
    """
    if not op.is_mean:
        raise InvalidArgumentError(f"weight={shown(weight)} is for op='mean', got op={op.name!r}")
    try:
        number: float | complex = to_python_number(weight, Op.MEAN)
    except (PayloadTypeError, RuntimeError):  # a tensor on the device meta has no value
        number = math.nan
    if isinstance(number, (bool, complex)) or not 0 <= number < math.inf:
        raise InvalidArgumentError(f"weight={shown(weight)} is not a finite number of at least 0")
    return number


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """A value whose weighted mean is the quotient of two sums, which are reduced together.

    Attributes:
        tree: The value, with arrays as tensors.
        described: Descriptions of its leaves: what has to be the same on all ranks.
        summands: The leaves multiplied by the weight of this rank, and the weight.
        arrays: The indices of its arrays.
    """

    tree: PyTree
    described: Sequence[str]
    summands: Sequence[Any]
    arrays: frozenset[int]

    @classmethod
    def of(cls, value: object, weight: float, *, differentiable: bool) -> WeightedMean:
        """Flatten a value, and multiply its leaves by a weight.

        Raises:
            PayloadTypeError: A leaf has no mean.
        """
        tree = PyTree.of(value)
        leaves = tree.leaves
        arrays = frozenset(index for index, leaf in enumerate(leaves) if is_array(leaf))
        for index in arrays:
            leaves[index] = tensor_from_array(leaves[index])
        described = [f"{'an array of ' * (index in arrays)}{describe(leaf)}" for index, leaf in enumerate(leaves)]
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            summands = [_weighted(leaf, weight, differentiable=differentiable) for leaf in leaves]
        return cls(tree, described, [*summands, weight], arrays)

    def result(self, sums: Sequence[Any]) -> Any:  # noqa: ANN401 - as the value
        """Return the mean, given the sums of what the ranks have in `summands`: not a number if all weights are 0."""
        *sums, total = sums
        means = [_mean(leaf, sum_, total) for leaf, sum_ in zip(self.tree.leaves, sums, strict=True)]
        return self.tree.rebuild(array_from_tensor(one) if i in self.arrays else one for i, one in enumerate(means))


def _weighted(leaf: Any, weight: float, *, differentiable: bool) -> Any:  # noqa: ANN401 - a tensor, a number or None
    """Return a leaf multiplied by a weight, in the dtype in which it is summed.

    What has no weight is 0, also if it is not a number, as the mean loss of no samples.
    """
    if leaf is None:
        return None
    if not isinstance(leaf, torch.Tensor):
        number = to_python_number(leaf, Op.MEAN)
        return (number if weight else type(number)()) * weight
    if differentiable:
        require_differentiable(leaf)
    plain = dense(leaf)
    plan(plain.dtype, Op.MEAN)
    wide = (leaf if leaf.requires_grad and differentiable else plain).to(_wide_dtype(plain))
    # Where the weight is 0, the result still depends on the leaf, so that it has a gradient.
    return wide * weight if weight else wide.masked_fill(torch.tensor(True, device=wide.device), 0)


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.float32 if tensor.dtype in HALVES else tensor.dtype
    return torch.float64 if has_float64(tensor.device) else torch.float32


def _mean(leaf: Any, total: Any, weight: float) -> Any:  # noqa: ANN401 - a tensor, a number or None
    if leaf is None:
        return None
    if not isinstance(leaf, torch.Tensor):
        return total / weight if weight else total * math.nan
    mean = total / weight
    return mean.to(leaf.dtype) if leaf.is_floating_point() or leaf.is_complex() else mean
