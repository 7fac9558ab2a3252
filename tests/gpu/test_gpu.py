"""On a real accelerator: one is enough for what a single process decides; two for talking over its backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankwise as rw

COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no accelerator"),
]


def test_a_session_binds_the_device_and_takes_both_backends() -> None:
    with rw.init() as session:
        assert session.device.index == torch.accelerator.current_device_index()
        assert (
            session.backend == f"cpu:gloo,{session.device.type}:{dist.get_default_backend_for_device(session.device)}"
        )
        ones = torch.ones(3, device=session.device)
        assert rw.all_reduce(ones, op="mean").device == session.device
        assert rw.all_gather(ones)[0].device == session.device
        assert rw.all_reduce(torch.ones(3)).device.type == "cpu"
        assert rw.broadcast(ones).device == session.device
        rw.barrier()


def test_the_cpu_can_be_asked_for() -> None:
    with rw.init(device="cpu") as session:
        assert (session.device.type, session.backend) == ("cpu", "gloo")
        staged = rw.all_reduce(torch.ones(2, device=torch.accelerator.current_accelerator()))
        assert staged.device.type != "cpu", "through the CPU and back"


def test_a_non_blocking_collective_uses_the_stream_of_its_caller() -> None:
    with rw.init() as session:
        stream = torch.Stream(session.device)
        with stream:
            value = torch.zeros(1 << 24, device=session.device)
            for _ in range(100):
                value += 1  # still in the queue of the stream when the collective starts
            reducing, gathering = rw.all_reduce(value, async_op=True), rw.all_gather(value, async_op=True)
            reduced, gathered = reducing.wait(), gathering.wait()[0]
            assert reduced.device == gathered.device == session.device
            assert reduced.eq(100).all()
            assert gathered.eq(100).all()


@pytest.mark.skipif(COUNT < 2, reason="needs two accelerators")
def test_ranks_talk_between_devices() -> None:
    def talk() -> tuple[float, list[int]]:
        with rw.init(timeout=60.0):
            mine = torch.full((4,), float(rw.get_rank()), device=rw.device())
            ragged = rw.all_gather(torch.ones(rw.get_rank(), device=rw.device()))
            return rw.all_reduce(mine, op="mean").mean().item(), [part.numel() for part in ragged]

    assert rw.launch(talk, nproc=2) == [(0.5, [0, 1])] * 2


@pytest.mark.ranks(1, device="cuda")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_rank_has_its_device_before_it_joins() -> None:
    assert torch.cuda.is_initialized()


@pytest.mark.ranks("serial", 1)
def test_tests_stay_on_the_cpu(world: rw.Session) -> None:
    assert world.device.type == "cpu"
    assert rw.device().type == "cpu"
