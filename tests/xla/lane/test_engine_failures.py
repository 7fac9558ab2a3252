"""What goes wrong on one device is a clear error on all of them, in bounded time, and the next call works."""

from __future__ import annotations

import threading

import pytest
import torch

import rankwise as rw
from tests.xla.device_ranks import DEVICES

_threads = threading.Barrier(DEVICES)

pytestmark = pytest.mark.ranks(2, 4)


def ones(session: rw.Session, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device=session.device, dtype=dtype)


@pytest.fixture
def works_afterwards(session: rw.Session) -> object:
    yield
    assert rw.all_reduce(ones(session, 5)).tolist() == [DEVICES] * 5
    assert rw.all_gather(session.rank) == list(range(DEVICES))


@pytest.mark.usefixtures("works_afterwards")
def test_another_shape_or_type(session: rw.Session) -> None:
    for length, dtype in ((4, torch.float32), (3, torch.float64)):
        own = ones(session, length, dtype=dtype) if session.rank == 1 else ones(session, 3)
        with pytest.raises(rw.MismatchError):
            rw.all_reduce(own)


@pytest.mark.usefixtures("works_afterwards")
def test_a_tensor_on_another_device(session: rw.Session) -> None:
    own = torch.ones(3000, device=torch.device("cpu")) if session.rank == 1 else ones(session, 3000)
    with pytest.raises(rw.MismatchError):
        rw.all_reduce(own)


@pytest.mark.usefixtures("works_afterwards")
def test_another_collective(session: rw.Session) -> None:
    with pytest.raises(rw.MismatchError):
        if session.rank == 1:
            rw.all_gather(ones(session, 3))
        else:
            rw.all_reduce(ones(session, 3))


@pytest.mark.usefixtures("works_afterwards")
def test_a_value_that_one_rank_cannot_reduce(session: rw.Session) -> None:
    value = object() if session.rank == 1 else ones(session, 3)
    with pytest.raises(TypeError if session.rank == 1 else rw.RemoteRankError):
        rw.all_reduce(value)


@pytest.mark.usefixtures("works_afterwards")
def test_a_graph_that_one_device_cannot_compile(session: rw.Session) -> None:
    """What is pending is executed before the ranks agree: its error is that of one rank."""
    own = ones(session, 3, dtype=torch.int32)
    if session.rank == 1:
        own = (own >> 31) & (2**31 - 1)  # torch_xla rounds the number to a float that is too large
    with pytest.raises(RuntimeError if session.rank == 1 else rw.RemoteRankError):
        rw.all_reduce(own)
    del own


@pytest.mark.usefixtures("works_afterwards")
def test_an_error_between_two_collectives_does_not_stop_the_first(session: rw.Session) -> None:
    reduced = rw.all_reduce(ones(session, 3))
    with pytest.raises(TypeError if session.rank == 1 else rw.RemoteRankError, match="another error"):
        rw.all_gather(_Failing() if session.rank == 1 else 1)
    assert reduced.tolist() == [DEVICES] * 3


class _Failing:
    def __reduce__(self) -> str:
        raise RuntimeError("another error")


def test_a_rank_that_never_comes(session: rw.Session) -> None:
    rw.barrier()
    session.close()
    with rw.init(timeout=2.0) as short:
        if short.rank != 1:
            with pytest.raises(rw.CollectiveTimeoutError, match="rank 1"):
                rw.all_reduce(ones(short, 3))
        _threads.wait(100.0)
    with rw.init(timeout=100.0):
        assert rw.all_reduce(1) == DEVICES


def test_a_rank_that_leaves(session: rw.Session) -> None:
    rw.barrier()
    if session.rank == 1:
        session.close(reason="left with ValueError: no data", failed=True)
    else:
        with pytest.raises(rw.CollectiveError, match="rank 1 left with ValueError: no data"):
            rw.all_reduce(ones(session, 3))
