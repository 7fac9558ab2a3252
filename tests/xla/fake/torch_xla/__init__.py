"""A substitute for torch_xla: the names that rankwise and users of this package call, with ranks that are threads.

For tests where torch_xla is not installed, with tests/xla/fake on the search path. `make test-xla` compares names and
signatures with those of torch_xla. There are no XLA tensors without it: collectives take tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _XLAC

__version__ = "2.9.0+fake"


def device(index: int | None = None) -> torch.device:
    _XLAC.initialize()
    return torch.device("xla", _XLAC.state.ordinal if index is None else index)


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    _XLAC.calls.append("sync")


def launch(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    from torch_xla.distributed import xla_multiprocessing  # noqa: PLC0415 - which imports this module

    xla_multiprocessing.spawn(fn, args=args, nprocs=1 if debug_single_process else None, start_method=start_method)
