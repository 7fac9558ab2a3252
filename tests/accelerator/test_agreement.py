"""Ranks that make other calls, fail or die: the same errors with tensors on a device as on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch

import rankwise as rw
from tests.accelerator.ranks import error_of, in_session, ramp

DIFFER = "the calls of the ranks differ: "
WAYS = {
    "op": DIFFER + "all_reduce(op='sum') on rank 0, all_reduce(op='max') on rank 1",
    "dtype": DIFFER + "the value is float32[4] on simdev on rank 0, float16[4] on simdev on rank 1",
    "shape": DIFFER + "the value is float32[4] on simdev on rank 0, float32[5] on simdev on rank 1",
    "skips": DIFFER + "all_reduce(op='sum') on rank 0, barrier() on rank 1",
    "scatters": DIFFER + "all_reduce(op='sum') on rank 0, reduce_scatter(op='sum') on rank 1",
}


@pytest.fixture(autouse=True, params=["", "1"], ids=["the host waits", "the host goes on"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_ASYNC", request.param)


def call_of(way: str, rank: int, device: torch.device) -> object:
    x = ramp(device, rank)
    if rank == 0:
        return rw.all_reduce(x)
    if way == "skips":
        return rw.barrier()
    if way == "scatters":
        return rw.reduce_scatter([x, x])
    if way == "shape":
        return rw.all_reduce(torch.ones(5, device=device))
    return rw.all_reduce(x.half() if way == "dtype" else x, op="max" if way == "op" else "sum")


def test_calls_that_differ_are_refused_before_data_moves() -> None:
    def body(session: rw.Session) -> list[object]:
        rank, device = session.rank, session.device
        found: list[object] = []
        for way in WAYS:
            found.append(error_of(partial(call_of, way, rank, device)))
            found.append(rw.all_reduce(ramp(device, rank)).tolist())
        return found

    expected = [value for text in WAYS.values() for value in (text, [1, 3, 5, 7])]
    for found in in_session(body):
        for value, wanted in zip(found, expected, strict=True):
            assert value == wanted or (isinstance(wanted, str) and wanted in value)


def test_without_checks_the_next_call_finds_the_difference() -> None:
    def body(session: rw.Session) -> list[object]:
        rank, device = session.rank, session.device
        same = rw.all_reduce(ramp(device, rank)).tolist()
        rw.barrier()
        rw.all_reduce(ramp(device, rank), op="max" if rank else "sum")
        return [same, error_of(rw.barrier), error_of(rw.barrier)]

    for same, error, after in in_session(body, check=False):
        assert same == [1, 3, 5, 7]
        assert "MismatchError: the calls of the ranks differ: the last unverified call before it is" in error
        assert "number 1, all_reduce(op='sum') of float32[4] on simdev" in error
        assert after == "no error"


@pytest.mark.parametrize("way", ["raises", "dies"])
def test_a_rank_that_ends_is_named(way: str) -> None:
    def body() -> None:
        with rw.init(timeout=60.0) as session:
            rw.all_reduce(ramp(session.device, session.rank))
            if session.rank == 1:
                if way == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("no data")
            rw.all_reduce(ramp(session.device, session.rank))

    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(body, nproc=2)
    assert ("raised ValueError: no data" if way == "raises" else "killed by SIGKILL") in str(caught.value)


OF_ANOTHER_RANK: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": rw.all_reduce,
    "all_reduce_": rw.all_reduce_,
    "sync_grads": lambda x: rw.sync_grads([with_gradient(x)]),
    "reduce_scatter": lambda x: rw.reduce_scatter([x, x]),
    "all_gather": rw.all_gather,
    "all_gather_cat": rw.all_gather_cat,
    "gather": lambda x: rw.gather({"x": x}, dst=0),
    "broadcast": lambda x: rw.broadcast({"x": x} if rw.get_rank() == 1 else None, src=1),
    "all_to_all": lambda x: rw.all_to_all([x, x]),
    "sync_params": lambda x: rw.sync_params([x]),
}


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(x))
    parameter.grad = x
    return parameter


def test_a_tensor_on_the_device_of_another_rank_is_refused_on_all() -> None:
    def run() -> list[tuple[str, str]]:
        with rw.init(timeout=60) as session:
            x, own = torch.ones(4, device="simdev:0"), torch.ones(2, device=session.device)
            return [
                (error_of(partial(call, x)), error_of(partial(rw.all_reduce, own))) for call in OF_ANOTHER_RANK.values()
            ]

    reason = "a tensor is on simdev:0, and the device of rank 1 is simdev:1"
    for name, first, second in zip(OF_ANOTHER_RANK, *rw.launch(run, nproc=2), strict=True):
        assert second[0].startswith(f"PayloadTypeError: {reason}"), (name, second)
        assert first[0].startswith("RemoteRankError: "), (name, first)
        assert reason in first[0], name
        assert first[1] == second[1] == "no error", name  # the group can still be used
