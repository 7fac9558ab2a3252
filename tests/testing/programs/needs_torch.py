"""Tests of a project whose own code does not import torch."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.ranks(2)
def test_in_ranks() -> None:
    pass


@pytest.mark.ranks("serial")
def test_alone(world: Any) -> None:
    pass


def test_alone_and_without_a_world() -> None:
    pass
