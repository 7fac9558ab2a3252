"""Checks of arguments and values, as in rankwise's own collectives, and the words of their messages.

Integers and bools may be those of numpy and torch.
"""

from __future__ import annotations

import torch

from rankwise._arguments import as_bool, as_integer, as_seconds, as_text, integer
from rankwise._collectives.pytree import describe
from rankwise._comm.buffers import is_expanded
from rankwise._comm.dense_tensors import dense
from rankwise._comm.reduce_ops import Op, plan
from rankwise._text import ranks_text
from rankwise._torch import is_compiled
from rankwise.errors import PayloadTypeError

__all__ = [
    "as_bool",
    "as_integer",
    "as_seconds",
    "as_text",
    "check_op",
    "check_reducible",
    "check_writable",
    "describe",
    "integer",
    "is_compiled",
    "ranks_text",
]


def check_op(op: str) -> str:
    """Return the name of a reduction, as `rankwise.all_reduce` takes it.

    Local.

    Raises:
        InvalidArgumentError: There is no such reduction.

    Example:
        >>> check_op("mean")
        'mean'
    """
    return Op.parse(op).name


def check_reducible(tensor: torch.Tensor, op: str) -> None:
    """Check that a tensor can be reduced.

    Local.

    Args:
        tensor: Any tensor.
        op: The name of the reduction.

    Raises:
        InvalidArgumentError: There is no such reduction.
        PayloadTypeError: The tensor is not dense, or the reduction is not defined for its type.

    Example:
        >>> check_reducible(torch.ones(1).to_sparse(), "sum")
        Traceback (most recent call last):
        rankwise.errors.PayloadTypeError: only dense tensors can be reduced, got torch.sparse_coo on cpu
    """
    plan(dense(tensor).dtype, Op.parse(op))


def check_writable(tensor: torch.Tensor) -> None:
    """Check that every element of a dense tensor has memory of its own, so that a result can be written into it.

    Local.

    Raises:
        PayloadTypeError: The tensor is expanded.

    Example:
        >>> check_writable(torch.ones(3))
    """
    if is_expanded(tensor):
        raise PayloadTypeError(
            f"{describe(tensor)} is expanded: several of its elements share memory; pass tensor.clone()"
        )
