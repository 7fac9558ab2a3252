"""What tests of sessions share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def foreign_group() -> Iterator[dist.ProcessGroup]:
    """A process group that somebody else opened."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()
    sys.excepthook = hook
