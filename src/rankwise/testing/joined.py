"""The session that a test runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankwise.session.current import close_in_force, forget, session_in_force
from rankwise.session.joining import init
from rankwise.session.session import Session
from rankwise.testing.marker import ranks_of
from rankwise.testing.rank import FAILURE

# Beyond the test's own limit, which tells more.
_LATER_SECONDS = 5.0


@contextmanager
def joined(item: pytest.Item) -> Iterator[Session]:
    """Join the world of a test that runs in ranks, and leave it. Collective over the world."""
    ranks = ranks_of(item)
    if ranks is None:
        raise TypeError("the test has no marker")
    session = init(backend=ranks.backend, device=ranks.device, timeout=ranks.timeout + _LATER_SECONDS)
    try:
        yield session
    finally:
        failure = item.stash.get(FAILURE, "")
        close_in_force(reason=f"left with {failure}" if failure else "left the test", failed=bool(failure))


@contextmanager
def alone() -> Iterator[Session]:
    """Be this process with nothing joined. Local."""
    forget()
    yield session_in_force()
    close_in_force()
