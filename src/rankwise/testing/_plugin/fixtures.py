"""The session of a test, and its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import torch.distributed as dist

from rankwise._environment.variables import VARIABLES
from rankwise._session.api import init
from rankwise._session.current import Current, close_current, reset_current
from rankwise._session.device import bind, choose_backend, choose_device
from rankwise._session.environ import read_environment
from rankwise._session.session import Session, SessionState
from rankwise.testing._plugin import timeouts
from rankwise.testing._plugin.marker import RanksMarker, read_marker

# The error of the test on this rank, for the fixture that closes the session.
FAILURE: Final = pytest.StashKey[str]()
# The closed process group of a test, whose last reference is dropped when the test has been reported.
CLOSED_GROUP: Final = pytest.StashKey[list[object]]()


def select_device(marker: RanksMarker, *, is_rank: bool) -> None:
    """Make a marker's device the current one of a rank, whether or not its test joins. Local.

    Raises:
        InvalidArgumentError: There is no such device here, or no such backend.
        JoinError: There are fewer devices than ranks.
    """
    local_rank = read_environment().local_rank if is_rank else None
    device = choose_device(0 if local_rank is None else local_rank.value, marker.device)
    choose_backend(marker.backend, device)
    if is_rank:  # in pytest's own process it would remain for other tests
        bind(device)


@contextmanager
def joined_session(item: pytest.Item) -> Iterator[Session]:
    """Join the world of a test that runs in ranks, and leave it. Collective over the world."""
    marker = read_marker(item)
    if marker is None:
        raise TypeError("the test has no marker")
    session = init(
        backend=marker.backend, device=marker.device, timeout=marker.timeout + timeouts.SESSION_EXTRA_SECONDS
    )
    try:
        yield session
    finally:
        closed: list[object] = [dist.group.WORLD]
        item.stash[CLOSED_GROUP] = closed
        failure = item.stash.get(FAILURE, "")
        close_current(reason=f"left with {failure}" if failure else "left the test", failed=bool(failure))


@contextmanager
def serial_session(item: pytest.Item) -> Iterator[Session]:
    """Return a session of this process alone, whichever launcher has started pytest. Local."""
    marker = read_marker(item)
    reset_current()
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        device = choose_device(0, "cpu" if marker is None else marker.device)
        Current.inferred = inferred = SessionState(read_environment(), device=device)
        yield Session(inferred)
    close_current()
