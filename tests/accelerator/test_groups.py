"""Groups of some ranks: their communicators are made of the default group's, in which all ranks take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankwise as rw
import rankwise.compat.ignite as idist
from tests.accelerator.ranks import in_session


@pytest.fixture(autouse=True)
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_COUNT", "3")


def test_a_group_of_its_members_alone_needs_no_other_rank() -> None:
    def body(session: rw.Session) -> Any:
        if session.rank == 2:
            return None
        x = torch.ones(2, device=session.device) + session.rank
        return idist.all_reduce(x, group=[0, 1]).tolist()

    assert in_session(body, nproc=3, timeout=15) == [[3, 3], [3, 3], None]


def test_a_group_that_all_ranks_make() -> None:
    def body(session: rw.Session) -> Any:
        group = rw.new_group([0, 2])
        if group.rank is None:
            return None
        return rw.all_reduce(torch.ones(2, device=session.device), group=group).tolist()

    assert in_session(body, nproc=3, timeout=15) == [[2, 2], None, [2, 2]]
