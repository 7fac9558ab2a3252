"""Collectives of torch_xla between device threads, without rankwise: the other tests of the lane rely on them."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tests.xla.device_ranks import DEVICES

pytestmark = pytest.mark.ranks(1, 2, 4)


def test_the_world_is_as_large_as_there_are_devices() -> None:
    assert xr.world_size() == xr.local_device_count() == DEVICES
    assert 0 <= xr.global_ordinal() < DEVICES
    assert torch_xla.device().type == "xla"


def test_collectives_of_torch_xla_return_the_values_of_all_ranks() -> None:
    rank, size = xr.global_ordinal(), xr.world_size()
    for offset in range(20):
        own = torch.arange(4.0, device=torch_xla.device()) + rank + offset
        assert xm.all_reduce("sum", own).tolist() == [sum(k + r + offset for r in range(size)) for k in range(4)]
        assert xm.all_gather(own[None]).tolist() == [[k + r + offset for k in range(4)] for r in range(size)]
        sent = [torch.full((3,), float(rank), device=own.device)]
        xm.collective_broadcast(sent, root_ordinal=size - 1)
        assert sent[0].tolist() == [size - 1.0] * 3
    assert xm.rendezvous("payloads", bytes([rank])) == [bytes([r]) for r in range(size)]
