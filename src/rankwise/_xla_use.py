"""The type of XLA devices, and whether this process uses them: all that processes without them have to know.

The rest is in `_torch_xla`, which is imported where XLA devices are used, so that other processes do not depend on it.
"""

from __future__ import annotations

import sys
from typing import Final

DEVICE_TYPE: Final = "xla"


def is_used() -> bool:
    """Return whether this process uses XLA devices already. Imports nothing."""
    package = sys.modules.get("torch_xla")
    native = getattr(package, "_XLAC", None)  # there is none while another thread imports the package
    return native is not None and bool(native._xla_runtime_is_initialized())  # noqa: SLF001 - no public name


def is_own_group(group: object) -> bool:
    """Return whether a process group is one of torch_xla: without a store, and for tensors on XLA devices alone."""
    module = sys.modules.get("torch_xla.distributed.xla_backend")  # another thread may be importing it
    return isinstance(group, getattr(module, "ProcessGroupXla", ()))
