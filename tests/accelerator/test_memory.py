"""A rank whose device has too little memory: it fails before any data moves, and the others raise its error."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._comm.data.plane import empty_on_cpu
from tests.accelerator.ranks import in_session

SIZE = 1 << 20


# The limit is more than an operation has when the ranks agree, without a buffer for the list, and less than with it.
@pytest.mark.parametrize(("operation", "limit"), [("all_gather", 4), ("reduce_scatter", 6)])
def test_the_buffers_of_lists_are_made_before_the_agreement(operation: str, limit: int) -> None:
    def body(session: rw.Session) -> str:
        x = torch.ones(SIZE, device=session.device)
        pieces = [x, torch.ones(SIZE, device=session.device)]
        if session.rank == 1:
            os.environ["SIMDEV_MEMORY"] = str(4 * SIZE * limit + (1 << 16))
        try:
            rw.all_gather(x) if operation == "all_gather" else rw.reduce_scatter(pieces)
        except (rw.RankwiseError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = in_session(body, timeout=20)
    assert first.startswith("RemoteRankError: "), first
    assert second == "OutOfMemoryError: simdev out of memory"


def test_a_gathered_tensor_takes_one_buffer() -> None:
    def body(session: rw.Session) -> Any:
        x = torch.full((SIZE,), float(session.rank), device=session.device)
        os.environ["SIMDEV_MEMORY"] = str(4 * SIZE * 3 + (1 << 16))
        return rw.all_gather_cat(x).view(2, SIZE).sum(1).tolist()

    assert in_session(body) == [[0.0, SIZE]] * 2


def test_tensors_that_go_through_the_cpu_are_copied_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        with rw.init(device="cpu") as session:
            x = torch.ones(1000, device=torch.device("simdev", session.rank))
            before = pinned()
            results = [rw.all_reduce(x)[0].item(), rw.all_gather(x)[1][0].item()]
            rw.all_reduce(x.cpu())
            assert torch.simdev.contexts() == [session.rank]  # type: ignore[attr-defined]
            return results, pinned() - before

    def pinned() -> int:
        return int(torch.simdev.pinned())  # type: ignore[attr-defined]

    for results, number in rw.launch(run, nproc=2):
        assert results == [2.0, 1.0]
        assert number >= 2
    # Torch keeps such memory for good, and locks it: large tensors get none.
    monkeypatch.setattr("rankwise._comm.data.plane._MOST_PINNED_BYTES", 100)
    large = torch.ones(1000, device="simdev")
    before = pinned()
    assert empty_on_cpu(large).shape == large.shape
    assert pinned() == before
