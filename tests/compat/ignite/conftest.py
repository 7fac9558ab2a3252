"""Fixtures for bodies that run in every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def tmp_path_of_world(tmp_path: Path) -> str:
    """A folder that all ranks of this test share."""
    return str(tmp_path)


@pytest.fixture
def torch_random() -> Iterator[None]:
    """Give torch's random state back afterwards: loaders draw from it, and so does Ignite's sampler."""
    with torch.random.fork_rng():
        yield
