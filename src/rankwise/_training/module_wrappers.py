"""Modules that average gradients themselves: those of DDP and FSDP."""

from __future__ import annotations

import sys

import torch

from rankwise._torch import uncompiled
from rankwise.errors import InvalidArgumentError

# Classes, with the module that defines them: if it is not imported, there is no such wrapper.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)


def refuse_wrappers(module: torch.nn.Module, caller: str) -> None:
    """Check that a module is not one of DDP or FSDP, also if it is compiled.

    Raises:
        InvalidArgumentError: It is one.
    """
    loaded = [(sys.modules.get(home), name) for home, name in _WRAPPERS]
    wrappers = tuple(getattr(home, name) for home, name in loaded if hasattr(home, name))
    inner = uncompiled(module)
    if isinstance(inner, wrappers):
        kind = next(wrapper.__name__ for wrapper in wrappers if isinstance(inner, wrapper))
        raise InvalidArgumentError(
            f"{caller} got a module of {kind}, which averages gradients itself, in backward(): leave {caller} out, or "
            "pass a module without it"
        )
