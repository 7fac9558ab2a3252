"""`torch_xla.core.xla_model`: collectives between the threads of this process, on tensors of the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _XLAC

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> Any:
    if isinstance(inputs, list):
        for tensor in inputs:
            tensor.copy_(all_reduce(reduce_type, tensor, scale, groups))
        return inputs
    _XLAC.calls.append("all_reduce")
    reduced = functools.reduce(_REDUCTIONS[reduce_type], _XLAC.exchange(inputs.clone()))
    return reduced if scale == 1.0 else reduced * scale


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: list[list[int]] | None = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
    channel_id: Any = None,
    use_global_device_ids: Any = None,
) -> torch.Tensor:
    _XLAC.calls.append("all_gather")
    return torch.cat(_XLAC.exchange(value.clone()), dim=dim)


def collective_broadcast(
    tensors: list[torch.Tensor],
    root_ordinal: int = 0,
    groups: list[int] | None = None,
    pin_layout: bool = True,
) -> None:
    _XLAC.calls.append("collective_broadcast")
    for tensor in tensors:
        tensor.copy_(_XLAC.exchange(tensor.clone())[root_ordinal])


def rendezvous(tag: str, payload: bytes = b"", replicas: list[int] = []) -> list[bytes]:
    _XLAC.calls.append("rendezvous")
    return _XLAC.exchange(payload)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[..., Any]) -> Any:
    _XLAC.calls.append("mesh_reduce")
    return reduce_fn(_XLAC.exchange(data))


def get_local_ordinal() -> int:
    return _XLAC.state.ordinal


def is_master_ordinal(local: bool = True) -> bool:
    return _XLAC.state.ordinal == 0


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    _XLAC.initialize()
    return list(_XLAC.devices)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] = {},
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> Any:
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    all_reduce("sum", gradients, 1 / len(_XLAC.replicated))
    return optimizer.step(**optimizer_args)
