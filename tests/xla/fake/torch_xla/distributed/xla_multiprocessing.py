"""`torch_xla.distributed.xla_multiprocessing`: ranks are threads of this process, where torch_xla starts a child."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_xla import _XLAC
from torch_xla import runtime as xr
from torch_xla._internal import pjrt


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    if nprocs == 1:
        fn(0, *args)
        return
    if nprocs is not None:
        raise ValueError(f"Unsupported nprocs ({nprocs}). Please use nprocs=1 or None")
    if _XLAC.devices:
        raise RuntimeError("Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.")
    pjrt._run_thread_per_device(0, 1, lambda: fn(xr.global_ordinal(), *args), pjrt.initialize_multiprocess)
