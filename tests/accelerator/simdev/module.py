"""torch.simdev, the module of the simulated device, and its backend: torch loads this in every process by itself."""

from __future__ import annotations

import importlib
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "simdev"


def load() -> None:
    """Make the device known to torch, under its name."""
    native: Any = importlib.import_module("simdev._simccl")  # needs torch's libraries

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend()

    def make_backend(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        default: Any = dist.group.WORLD
        if default is not None and (bound := default.bound_device_id) is not None:
            # As torch does for NCCL: a group is split from the default group if that has a device.
            default._get_backend(bound).perform_nocolor_split(bound)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        return native.make_backend(gloo, dist.PrefixStore("simccl", store))

    dist.Backend.register_backend("simccl", make_backend, devices=[NAME])
    if os.environ.get("SIMDEV_GLOO"):  # as for CUDA, gloo serves the device too
        dist.Backend.backend_capability["gloo"] = [*dist.Backend.backend_capability["gloo"], NAME]


def _module(native: Any) -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    for name in (
        "is_available",
        "device_count",
        "current_device",
        "is_initialized",
        "init",
        "races",
        "contexts",
        "pinned",
    ):
        setattr(module, name, getattr(native, name))
    module._lazy_init, module._is_in_bad_fork = native.init, native.is_in_bad_fork

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(native.current_device() if index is None else index)

    def seed_all(seed: int) -> None:
        if native.is_initialized():
            for index in range(native.device_count()):
                native.manual_seed(index, seed)

    module.set_device = lambda device: native.set_device(index_of(device))
    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.get_device_properties = lambda device: SimpleNamespace(uuid=native.uuid(index_of(device)))
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream, module.Event = torch.Stream, torch.Event
    module.manual_seed_all = seed_all
    module.manual_seed = lambda seed: native.manual_seed(native.current_device(), seed)
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module  # type: ignore[no-any-return]
