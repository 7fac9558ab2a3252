"""Groups of some ranks: their communicators are made of the default group's, in which all ranks take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.parametrize("is_bound", [True, False])
def test_the_first_operation_of_a_group_is_not_between_some_ranks(is_bound: bool) -> None:
    def run() -> Any:
        rank = rw.get_rank()
        device = torch.device("simdev", rank)
        dist.init_process_group("cpu:gloo,simdev:simccl", device_id=device if is_bound else None)
        with rw.init(timeout=15):
            x = torch.ones(2, device=device) + rank
            early: Any = rw.gather({"x": x} if rank < 2 else None, dst=0)  # rank 2 has nothing on its device
            total = rw.all_reduce(x).tolist()
            late: Any = rw.gather({"x": x} if rank < 2 else None, dst=0)  # by the backend
        dist.destroy_process_group()
        found = [] if rank else [early[1]["x"], late[1]["x"]]
        opened = torch.simdev.contexts()  # type: ignore[attr-defined]
        return total, [(each.tolist(), each.device) for each in found], opened

    results = rw.launch(run, nproc=3)
    sent = ([2, 2], torch.device("simdev", 0))
    assert results == [([6, 6], [sent, sent] if rank == 0 else [], [rank]) for rank in range(3)]
