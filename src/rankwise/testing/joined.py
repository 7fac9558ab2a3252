"""The session that a test runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import torch.distributed as dist

from rankwise.session.current import close_in_force, forget, session_in_force
from rankwise.session.joining import init
from rankwise.session.session import Session
from rankwise.testing.marker import ranks_of
from rankwise.testing.rank import CLOSED, FAILURE

# How the variables begin that say who a process is.
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_", "MASTER_"),
    *("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL"),
)
# Beyond the test's own limit, which tells more.
_LATER_SECONDS: Final = 5.0


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
        closed: list[object] = [dist.group.WORLD]
        item.stash[CLOSED] = closed
        failure = item.stash.get(FAILURE, "")
        close_in_force(reason=f"left with {failure}" if failure else "left the test", failed=bool(failure))


@contextmanager
def alone() -> Iterator[Session]:
    """Be this process with nothing joined, whatever launcher started pytest. Local."""
    forget()
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(_OF_LAUNCHERS):
                patch.delenv(name)
        yield session_in_force()
    close_in_force()
