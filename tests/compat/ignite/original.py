"""PyTorch-Ignite itself, to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

with warnings.catch_warnings():
    # What it imports of torch is deprecated there.
    warnings.simplefilter("ignore")
    import ignite
    import ignite.distributed as original

__all__ = ["ignite", "original", "without_useless"]


def without_useless(backends: Sequence[str]) -> tuple[str, ...]:
    """Return the backends without NCCL where there is no GPU: the original has it in a build for CUDA."""
    return tuple(name for name in backends if name != "nccl" or torch.cuda.is_available())
