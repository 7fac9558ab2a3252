"""Sessions of ranks that are threads: each has its own, and the rest of the process has none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr

import rankwise as rw
from rankwise._session.current import opened_session, reset_current
from rankwise._session.session import state_behind
from tests.xla.device_ranks import DEVICES

pytestmark = pytest.mark.ranks(1, 2, 4)


def test_getters_are_right_before_init() -> None:
    reset_current()
    assert (rw.get_rank(), rw.get_world_size()) == (xr.global_ordinal(), DEVICES)
    assert rw.topology() == rw.Topology(
        rank=xr.global_ordinal(),
        world_size=DEVICES,
        local_rank=xr.local_ordinal(),
        local_world_size=DEVICES,
        node_rank=0,
        num_nodes=1,
    )
    assert rw.device() == torch_xla.device()
    reset_current()


def test_a_rank_has_the_position_and_the_device_of_its_thread(session: rw.Session) -> None:
    assert (session.rank, session.world_size, session.backend) == (xr.global_ordinal(), DEVICES, "xla")
    assert session.device == rw.device() == torch_xla.device()
    assert rw.is_joined()
    assert opened_session() is state_behind(session)
    assert rw.all_gather(str(rw.device())) == [f"xla:{rank}" for rank in range(DEVICES)]


def test_a_session_is_joined_again_after_its_end(session: rw.Session) -> None:
    for _ in range(3):
        session.close()
        assert opened_session() is None
        session = rw.init(backend="xla", timeout=100.0)
        assert rw.all_reduce(1) == DEVICES
        with rw.init(device="xla") as inner:
            assert inner.rank == session.rank
        assert rw.all_reduce(2) == 2 * DEVICES, "the inner session left it open"


def test_a_thread_of_a_rank_uses_what_the_rank_passes(session: rw.Session) -> None:
    rank = session.rank
    work = rw.all_reduce(torch.full((3,), float(rank), device=session.device), async_op=True)
    result = work.wait()
    assert result.device == session.device
    assert result.tolist() == [sum(range(DEVICES))] * 3
    group = rw.new_group(range(DEVICES))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(rw.all_gather, rank, group=group).result()
    assert gathered == list(range(DEVICES))


@pytest.mark.ranks(2, 4)
def test_another_backend_or_device_is_refused(session: rw.Session) -> None:
    session.close()
    for arguments in ({"backend": "gloo"}, {"device": "cpu"}, {"backend": "cpu:gloo"}):
        with pytest.raises(rw.InvalidArgumentError, match="XLA"):
            rw.init(**arguments)  # type: ignore[arg-type]
        reset_current()


def test_numbers_of_another_world_are_refused(session: rw.Session) -> None:
    session.close()
    with pytest.raises(rw.JoinError, match=f"torch_xla has it as rank {xr.global_ordinal()} of {DEVICES}"):
        rw.init(backend="xla", rank=5, world_size=7, address="127.0.0.1:1")


@pytest.mark.ranks(2, 4)
def test_ranks_that_do_not_come_are_named(session: rw.Session) -> None:
    rw.barrier()
    session.close()
    if rw.get_rank() != 1:
        with pytest.raises(rw.JoinTimeoutError, match="rank 1 of"):
            rw.init(timeout=1.0)
    is_over = _together()
    assert is_over
    with rw.init(timeout=100.0):
        assert rw.all_reduce(1) == DEVICES


_barrier = threading.Barrier(DEVICES)


def _together() -> bool:
    """Wait for the other threads, without rankwise."""
    _barrier.wait(100.0)
    return True
