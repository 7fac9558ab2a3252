"""Ignite's computation models: the serial one, and process groups with their backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

has_native_dist_support: Final = dist.is_available()
# The values of Ignite without these packages: this drop-in supports neither XLA nor Horovod.
has_xla_support: Final = False
has_hvd_support: Final = False

SERIAL: Final = "serial"
NATIVE: Final = "native-dist"
_NATIVE_BACKENDS: Final = ("nccl", "gloo", "mpi")


@dataclass(frozen=True, slots=True)
class ComputationModel:
    """One of Ignite's computation models.

    Attributes:
        name: The name that `model_name()` returns.
    """

    name: str

    @property
    def available_backends(self) -> tuple[str, ...]:
        """The backends that `initialize()` takes on this host."""
        if self.name == SERIAL:
            return ()
        return tuple(name for name in _NATIVE_BACKENDS if _is_usable(name))


registered_computation_models: Final = (ComputationModel(SERIAL), ComputationModel(NATIVE))


def available_backends() -> tuple[str, ...]:
    """Return the backends that this build of torch has and this host can use.

    Local.

    Example:
        >>> "gloo" in available_backends()
        True
    """
    return tuple(name for model in registered_computation_models for name in model.available_backends)


def _is_usable(name: str) -> bool:
    return dist.is_backend_available(name) and (name != "nccl" or torch.cuda.is_available())
