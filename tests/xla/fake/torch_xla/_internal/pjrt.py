"""`torch_xla._internal.pjrt`: a thread for each device."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from torch_xla import _XLAC
from torch_xla.core import xla_model

R = TypeVar("R")


def initialize_multiprocess(local_rank: int, local_world_size: int) -> None:
    _XLAC.initialize()
    _XLAC.replicated[:] = _XLAC.devices


def _run_thread_per_device(
    local_rank: int,
    local_world_size: int,
    fn: Callable[[], R],
    initializer_fn: Callable[[int, int], None],
) -> dict[int, R]:
    initializer_fn(local_rank, local_world_size)

    def run(device: str) -> R:
        _XLAC._xla_set_default_device(device)
        return fn()

    devices = xla_model.get_xla_supported_devices()
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(devices)) as executor:
        return dict(enumerate(executor.map(run, devices)))
