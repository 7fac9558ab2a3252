"""A device without float64: means of integers are computed on the CPU, exactly, and rounded to float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankwise as rw
from tests.accelerator.ranks import in_session

LARGE = 1 << 40


def test_means_on_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_NO_FLOAT64", "1")

    def body(session: rw.Session) -> Any:
        device, rank = session.device, session.rank
        integers = torch.tensor([LARGE, 2**24 + rank], device=device)
        results = [
            rw.all_reduce(integers, op="mean"),
            rw.all_reduce(integers.int(), op="mean"),
            rw.all_reduce(torch.tensor([True, rank == 1], device=device), op="mean"),
            rw.reduce_scatter([integers, integers], op="mean"),
            rw.all_reduce(torch.ones(2, device=device) * rank, op="mean"),
        ]
        norm: Any = torch.nn.BatchNorm1d(2, device=device)
        norm.running_mean += rank
        rw.sync_buffers(norm)
        assert {result.dtype for result in results} == {torch.float32}
        assert {result.device for result in results} == {device}
        return [result.tolist() for result in results], norm.running_mean.tolist()

    means = [float(LARGE), 2**24 + 0.0]  # float32 has no 2**24 + 0.5
    expected = [means, [0.0, means[1]], [1.0, 0.5], means, [0.5, 0.5]]
    assert in_session(body) == [(expected, [0.5, 0.5])] * 2
