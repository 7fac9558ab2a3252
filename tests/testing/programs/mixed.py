"""Tests in ranks and without, of which the last in ranks fails where a fixture of those without has to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ends_badly() -> Iterator[None]:
    yield
    raise RuntimeError("a bad end of the module")


def test_without_ranks(ends_badly: None) -> None: ...


@pytest.mark.ranks(2)
def test_in_ranks() -> None:
    raise ValueError("no data")


def test_without_ranks_again(ends_badly: None) -> None: ...
