"""launch(fn, backend="xla"): a rank on each device, in processes of its own."""

from __future__ import annotations

import pytest

import rankwise as rw
from tests.xla.cpu_devices import support_collectives
from tests.xla.device_ranks import DEVICES


def reduced(offset: int) -> tuple[int, str, float]:
    support_collectives()
    with rw.init(timeout=100.0) as session:
        return session.rank, str(rw.device()), rw.all_reduce(rw.get_rank() + offset)


def fail_on_the_last() -> None:
    rw.init(timeout=100.0)
    if rw.get_rank() == DEVICES - 1:
        raise ValueError("no data")
    rw.barrier()


def test_results_come_back_by_rank() -> None:
    total = sum(range(DEVICES)) + 10 * DEVICES
    assert rw.launch(reduced, 10, backend="xla") == [(rank, f"xla:{rank}", total) for rank in range(DEVICES)]


def test_the_failure_is_that_of_the_rank() -> None:
    with pytest.raises(rw.RankFailedError, match="raised ValueError: no data") as caught:
        rw.launch(fail_on_the_last, backend="xla", nproc=DEVICES)
    assert caught.value.rank == DEVICES - 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(rw.InvalidArgumentError, match=f"this host has {DEVICES} XLA device"):
        rw.launch(reduced, 10, backend="xla", nproc=DEVICES + 1)
