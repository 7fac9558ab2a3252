"""Backend configurations as torch writes them: "gloo", or "cpu:gloo,cuda:nccl".

Torch's own `BackendConfig` is not in its `__all__`; it also replaces a single backend by the device types that it
supports, so that the string which the user wrote is lost. Whether a backend exists is checked in `_session.device`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """The backend of each device type.

    Attributes:
        pairs: Device types and their backends, in the order of the string. The device type is "" where the string names
            a backend alone, which then serves every device type that it supports.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> BackendConfig:
        """Return the configuration in a string, with the names of backends in lower case, as torch takes them.

        Example:
            >>> BackendConfig.parse("cpu:gloo,cuda:NCCL").pairs
            (('cpu', 'gloo'), ('cuda', 'nccl'))
            >>> BackendConfig.parse("gloo").pairs
            (('', 'gloo'),)
        """
        parts = (part.rpartition(":") for part in text.split(","))
        return cls(tuple((device_type, backend.lower()) for device_type, _, backend in parts))

    def __str__(self) -> str:
        return ",".join(f"{device_type}:{backend}" if device_type else backend for device_type, backend in self.pairs)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends, in the order of the string."""
        return tuple(backend for _, backend in self.pairs)

    def backend_for(self, device_type: str) -> str | None:
        """Return the backend of a device type; None if the string names no backend for it."""
        by_device_type = dict(self.pairs)
        return by_device_type.get(device_type, by_device_type.get(""))


def opened_accelerator() -> torch.device | None:
    """Return the type of accelerator that this process has opened; None if it has opened none."""
    import torch  # noqa: PLC0415 - only callers that have torch come here

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", bool)():
        return None
    return accelerator
