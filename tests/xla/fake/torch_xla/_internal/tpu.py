"""`torch_xla._internal.tpu`: the TPUs of this host, of which there are none."""

from __future__ import annotations


def num_local_processes() -> int:
    return 0


def num_available_chips() -> int:
    return 0
