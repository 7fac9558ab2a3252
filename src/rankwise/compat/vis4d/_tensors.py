"""Reductions of tensors, and the detection of modules that wrap others."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

import rankwise
from rankwise import is_joined
from rankwise.errors import PayloadTypeError
from rankwise.extend._dropins import check_op, is_compiled
from rankwise.extend.collectives import collective, describe

# Classes that wrap a module, with the module that defines them: if it is not imported, there is no such wrapper.
_WRAPPERS: Final = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("deepspeed", "DeepSpeedEngine"),
)


def reduce_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all ranks, as a new one; alone, or without a session, the tensor itself.

    Collective over the session. The mean of integers is float64; half precision is averaged in float32. Otherwise the
    result equals `tensor.clone() / get_world_size()` in strides, gradient and all else, but has the mean as its value.

    Raises:
        PayloadTypeError: The value is not a dense tensor, or its type has no mean.
        MismatchError: The ranks' tensors differ in shape or type.

    Example:
        >>> reduce_mean(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """
    if not is_joined() or rankwise.get_world_size() == 1:
        return tensor
    mean = rankwise.all_reduce(tensor, op="mean")
    if not isinstance(tensor, torch.Tensor) or not _is_inexact(tensor):
        return mean
    if type(tensor) is torch.Tensor and not tensor.requires_grad and mean.stride() == tensor.stride():
        return mean
    return _with_value(tensor.clone() / rankwise.get_world_size(), mean)


def all_reduce_dict(
    py_dict: Mapping[str, torch.Tensor],
    reduce_op: str = "sum",
    to_float: bool = True,
) -> Mapping[str, torch.Tensor]:
    """Return the reductions of a dict's tensors over all ranks; alone, or without a session, the dict itself.

    Collective over the session. Keys are matched in any order, and every tensor is reduced in its own type.
    Gradients of a "sum" or "mean" flow to this rank's tensors alone, as if the others' were constants.

    Args:
        py_dict: Tensors of the same keys, shapes and types on all ranks.
        reduce_op: An op of `rankwise.all_reduce`: "sum", "mean", "max", ...
        to_float: Return integers as float64, and half precision as float32.

    Returns:
        A dict, or an OrderedDict if this rank's is one, in the order of this rank's.

    Raises:
        InvalidArgumentError: There is no such op.
        PayloadTypeError: A value is not a tensor.
        MismatchError: The ranks' keys, shapes, types or ops differ.

    Example:
        >>> all_reduce_dict({"loss": torch.tensor(0.5)})
        {'loss': tensor(0.5000)}
    """
    if not is_joined() or rankwise.get_world_size() == 1:
        check_op(reduce_op)
        return py_dict
    with collective("all_reduce_dict", settings={"op": reduce_op, "to_float": to_float}):
        op = check_op(reduce_op)
        values = {key: _float_half(_checked(key, value), to_float=to_float) for key, value in py_dict.items()}
    reduced = rankwise.all_reduce(values, op=reduce_op)
    result: dict[str, torch.Tensor] = OrderedDict() if isinstance(py_dict, OrderedDict) else {}
    for key, value in values.items():
        result[key] = _float_whole(reduced[key], to_float=to_float)
        if value.requires_grad and op in {"sum", "mean"}:
            share = value / (rankwise.get_world_size() if op == "mean" else 1)
            result[key] = _with_value(share.contiguous(), result[key])
    return result


def is_module_wrapper(module: nn.Module) -> bool:
    """Return whether a module, or one in it, wraps another: DataParallel, DDP, FSDP 1 and 2, DeepSpeed, torch.compile.

    Local.

    Example:
        >>> is_module_wrapper(nn.Linear(1, 1)), is_module_wrapper(nn.DataParallel(nn.Linear(1, 1)))
        (False, True)
    """
    loaded = [(sys.modules.get(home), name) for home, name in _WRAPPERS]
    wrappers = tuple(getattr(home, name) for home, name in loaded if hasattr(home, name))
    known = (nn.DataParallel, nn.parallel.DistributedDataParallel, *wrappers)
    return any(isinstance(part, known) or is_compiled(part) for part in module.modules())


def _checked(key: str, value: Any) -> torch.Tensor:  # noqa: ANN401 - its type is checked here
    if not isinstance(value, torch.Tensor):
        raise PayloadTypeError(f"all_reduce_dict takes a dict of tensors, got {describe(value)} for {key!r}")
    return value


def _float_half(value: torch.Tensor, *, to_float: bool) -> torch.Tensor:
    """Return half precision as float32, before it is reduced."""
    return value.float() if to_float and value.dtype in {torch.float16, torch.bfloat16} else value


def _float_whole(value: torch.Tensor, *, to_float: bool) -> torch.Tensor:
    """Return integers as float64, after they were reduced exactly."""
    return value.double() if to_float and not _is_inexact(value) else value


def _is_inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _with_value(share: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's share with the value of the whole reduction. The gradient stays that of the share."""
    with torch.no_grad():
        return share.copy_(value)
