"""`torch_xla.distributed.parallel_loader`: batches on the device of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class MpDeviceLoader:
    """The batches of a data loader. They stay where they are: there are no XLA tensors."""

    def __init__(self, loader: Any, device: Any, **kwargs: Any) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)
