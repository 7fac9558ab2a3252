"""`torch_xla.distributed.xla_backend`: its import registers a backend of torch, whose groups have no store."""

from __future__ import annotations

import datetime as dt

import torch.distributed as dist


class ProcessGroupXla(dist.ProcessGroup):
    def __init__(self, prefix_store: dist.Store, rank: int, size: int, timeout: dt.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch_xla calls it
        self.prefix_store = prefix_store
        self.timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "xla"

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch has a type of its own
        return self._group_name


dist.Backend.register_backend("xla", ProcessGroupXla, devices="xla")
