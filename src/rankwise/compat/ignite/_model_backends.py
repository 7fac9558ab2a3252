"""Ignite's computation models by name, and the backends of each that this host can use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch
import torch.distributed as dist

has_native_dist_support: Final = dist.is_available()
# torch_xla is found, and imported only when it is used: the import takes seconds, and sets variables.
has_xla_support: Final = find_spec("torch_xla") is not None
has_hvd_support: Final = False

SERIAL: Final = "serial"
NATIVE: Final = "native-dist"
XLA: Final = "xla-dist"

NATIVE_BACKENDS: Final = ("nccl", "gloo", "mpi")
XLA_TPU: Final = "xla-tpu"
HOROVOD: Final = "horovod"
NO_HOROVOD: Final = (
    "Horovod is not supported: use 'nccl' on GPUs or 'gloo' on CPUs in its place, and torchrun, mpirun or "
    "`rankwise launch` in place of horovodrun"
)
_NO_XLA: Final = "torch_xla is not installed: install the version that belongs to this one of torch"


def available_backends() -> tuple[str, ...]:
    """Return the backends that are installed and that this host can use.

    Local.

    Example:
        >>> "gloo" in available_backends()
        True
    """
    return usable_backends(NATIVE) + usable_backends(XLA)


def usable_backends(model: str) -> tuple[str, ...]:
    """Return the backends of a computation model that this host can use.

    Local.

    Args:
        model: The name that `model_name()` returns.

    Example:
        >>> usable_backends("serial")
        ()
    """
    if model == NATIVE and has_native_dist_support:
        return tuple(name for name in NATIVE_BACKENDS if _is_usable(name))
    return (XLA_TPU,) if model == XLA and has_xla_support else ()


def is_usable(backend: object) -> bool:
    """Return whether this host can use a backend. One for several device types is checked when it is opened.

    Local.

    Example:
        >>> is_usable("gloo"), is_usable("smoke signals")
        (True, False)
    """
    return backend in available_backends() or (isinstance(backend, str) and ":" in backend)


def advice(backend: object) -> str:
    """Return the end of an error message: the remedy for a backend that this host cannot use, or nothing.

    Local.
    """
    remedies = {HOROVOD: NO_HOROVOD} | ({} if has_xla_support else {XLA_TPU: _NO_XLA})
    return f". {remedies[backend]}" if isinstance(backend, str) and backend in remedies else ""


def _is_usable(name: str) -> bool:
    return dist.is_backend_available(name) and (name != "nccl" or torch.cuda.is_available())
