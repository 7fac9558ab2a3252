"""Non-blocking collectives and streams: no race, and no order of groups in which two ranks wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankwise as rw
from tests.accelerator.ranks import in_session


@pytest.fixture(autouse=True, params=["", "1"], ids=["the host waits", "the host goes on"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", request.param)


def test_results_are_in_order_with_the_stream_that_takes_them() -> None:
    def body(session: rw.Session) -> list[Any]:
        device = session.device
        side = torch.Stream(device)
        x = torch.ones(1000, device=device) + session.rank
        work = rw.all_reduce(x, async_op=True)
        with side:  # another stream than that of the start
            summed = work.wait() + 1
            y = torch.ones(1000, device=device) * 2
            parts: rw.Work[Any] = rw.all_gather({"y": y, "name": "y"}, async_op=True)
            in_place: rw.Work[Any] = rw.all_reduce_(y + 1, async_op=True)
            gathered = parts.wait()[1]["y"] + in_place.wait()
            return [summed[0].item(), gathered[0].item()]

    assert in_session(body) == [[4, 8]] * 2


def test_inputs_may_be_dropped_and_their_memory_used_again() -> None:
    def body(session: rw.Session) -> list[float]:
        works = []
        for step in range(5):
            x = torch.full((1000,), float(step), device=session.device)
            works.append(rw.all_reduce(x, async_op=True))
            rw.all_gather([x], async_op=True)  # nobody waits for it
            del x
            torch.zeros(1000, device=session.device)
        return [work.wait()[0].item() for work in works]

    assert in_session(body) == [[0, 2, 4, 6, 8]] * 2


def test_groups_at_once_do_not_wait_for_each_other() -> None:
    def body(session: rw.Session) -> float:
        groups = [rw.new_group([0, 1]) for _ in range(3)]
        x = torch.ones(1000, device=session.device)
        total = 0.0
        for _ in range(10):
            works = [rw.all_reduce(x, group=group, async_op=True) for group in groups]
            total += sum(work.wait()[0].item() for work in works)
        return total

    assert in_session(body, timeout=30.0) == [60] * 2
