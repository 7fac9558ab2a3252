"""Fixtures for bodies that run in every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def torch_random() -> Iterator[None]:
    """Give torch's random state back afterwards, for bodies that build models."""
    with torch.random.fork_rng():
        yield
