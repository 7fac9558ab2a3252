"""`torch_xla.runtime`: positions of ranks."""

from __future__ import annotations

import os

from torch_xla import _XLAC


def device_type() -> str | None:
    return os.environ.get("PJRT_DEVICE", "CPU")


def world_size() -> int:
    return len(_XLAC.replicated) or 1


def global_ordinal() -> int:
    return _XLAC.state.ordinal


def local_ordinal() -> int:
    return _XLAC.state.ordinal


def local_device_count() -> int:
    return addressable_device_count()


def addressable_device_count() -> int:
    _XLAC.initialize()
    return len(_XLAC.devices)


def local_process_count() -> int:
    return 1


def process_index() -> int:
    return 0


def process_count() -> int:
    return 1


def host_index() -> int:
    return 0


def _init_world_size_ordinal() -> None:
    """Cache the position where each process has one device: not here."""
