"""Tests in worlds of four ranks: those of the plugin."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from rankwise._session.session import Session


@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", range(int(os.environ["TESTS"])))
def test_all_reduce(world: Session, number: int) -> None:
    tensor = torch.full((1,), float(number))
    dist.all_reduce(tensor)
    assert tensor.item() == number * world.world_size
