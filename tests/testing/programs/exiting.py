"""A test that ends the run, and one after it."""

from __future__ import annotations

import pytest

from rankwise._session.session import Session

pytestmark = pytest.mark.ranks(2)


def test_ends_the_run(world: Session) -> None:
    if world.rank == 1:
        pytest.exit("that is enough", returncode=7)


def test_never_runs() -> None:
    raise AssertionError
