"""The session that a test runs in."""

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
from rankwise._session.session import Session
from rankwise.testing._plugin.marker import RanksMarker, read_marker
from rankwise.testing._plugin.rank_session import CLOSED_GROUP, FAILURE

# Beyond the test's own limit, which tells more, and does not pass while somebody debugs a rank.
_LATER_SECONDS: Final = 24 * 3600.0


def select_device(ranks: RanksMarker, *, is_rank: bool) -> None:
    """Make the device that a marker asks for the current one of a rank, whether or not its test joins. Local.

    Raises:
        InvalidArgumentError: There is no such device here, or no such backend.
        JoinError: There are fewer devices than ranks.
    """
    local_rank = read_environment().local_rank if is_rank else None
    device = choose_device(0 if local_rank is None else local_rank.value, ranks.device)
    choose_backend(ranks.backend, device)
    if is_rank:  # and not for all tests of pytest's own process
        bind(device)


@contextmanager
def joined_session(item: pytest.Item) -> Iterator[Session]:
    """Join the world of a test that runs in ranks, and leave it. Collective over the world."""
    ranks = read_marker(item)
    if ranks is None:
        raise TypeError("the test has no marker")
    session = init(backend=ranks.backend, device=ranks.device, timeout=ranks.timeout + _LATER_SECONDS)
    try:
        yield session
    finally:
        closed: list[object] = [dist.group.WORLD]
        item.stash[CLOSED_GROUP] = closed
        failure = item.stash.get(FAILURE, "")
        close_current(reason=f"left with {failure}" if failure else "left the test", failed=bool(failure))


@contextmanager
def serial_session(item: pytest.Item) -> Iterator[Session]:
    """Be this process with nothing joined, whatever launcher started pytest. Local."""
    ranks = read_marker(item)
    reset_current()
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        device = choose_device(0, "cpu" if ranks is None else ranks.device)
        Current.inferred = Session(read_environment(), device=device)
        yield Current.inferred
    close_current()
