"""virtex's launch: any function, on the CPU too, with results and the first failure; nothing is left in the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import rankwise as rw
from rankwise.compat import virtex as dist
from tests.compat.adapted import PROGRAMS
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port


@pytest.mark.parametrize("size", variants([2, 4], slow=[2]))
def test_a_job_is_joined_and_its_results_come_back(size: int) -> None:
    """The original wants CUDA and a function that pickle can carry, always takes port 23456, and drops results."""
    offset = 10

    def job(scale: int) -> tuple[int, list[int], str]:
        place = dist.get_rank() * scale + offset
        return place, rw.all_gather(dist.get_rank()), os.environ["LOCAL_RANK"]

    everyone = list(range(size))
    wanted = [(rank * 2 + offset, everyone, str(rank)) for rank in range(size)]
    assert dist.launch(job, num_gpus_per_machine=size, args=(2,)) == wanted


def test_a_world_of_one_runs_here_and_leaves_nothing_open() -> None:
    """The original leaves an NCCL process group behind."""
    seen: list[tuple[int, int, bool]] = []

    def job() -> None:
        seen.append((dist.get_rank(), dist.get_world_size(), torch.distributed.is_initialized()))

    assert dist.launch(job) == [None]
    assert seen == [(0, 1, True)]
    assert not torch.distributed.is_initialized()
    with pytest.raises(ZeroDivisionError):
        dist.launch(lambda: 1 / 0)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_jobs_run_side_by_side() -> None:
    """The second one of the original finds port 23456 in use."""
    ended: list[list[int]] = []
    jobs = [
        threading.Thread(target=lambda: ended.append(dist.launch(lambda: rw.all_reduce(1), num_gpus_per_machine=2)))
        for _ in range(2)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(200)
    assert ended == [[2, 2], [2, 2]]


@pytest.mark.slow
def test_what_cannot_travel_back_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    """A function of the original may return any value, which is discarded there."""
    assert dist.launch(threading.Lock, num_gpus_per_machine=2) == [None, None]
    assert "returned a value that cannot be pickled, so launch() returns None for it" in capfd.readouterr().err


@pytest.mark.slow
def test_the_first_failure_ends_the_others() -> None:
    def one_raises() -> None:
        if dist.get_rank() == 1:
            raise FileNotFoundError("no such dataset")
        dist.synchronize()

    with pytest.raises(rw.RankFailedError, match=r"rank 1 of 2 on .* raised FileNotFoundError") as caught:
        dist.launch(one_raises, num_gpus_per_machine=2)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others() -> None:
    def one_dies() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.synchronize()

    with pytest.raises(rw.RankFailedError, match=r"rank 0 of 2 on .* was killed by SIGKILL"):
        dist.launch(one_dies, num_gpus_per_machine=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus_per_machine": 0}, "nproc=0 is not a number of processes"),
        ({"num_machines": 0}, "num_machines=0 is not a number of machines"),
        ({"num_machines": 2, "machine_rank": 2}, "machine_rank=2 is not one of 2, counted from 0"),
        ({"num_machines": 2, "dist_url": "file:///tmp/x"}, "dist_url='file:///tmp/x' is not tcp://host:port"),
        ({"num_machines": 2, "dist_url": "tcp://node0"}, "dist_url='tcp://node0' is not tcp://host:port"),
        ({"num_machines": 2, "dist_url": "tcp://node0:99999"}, "with a port from 1 to 65535"),
    ],
)
def test_what_cannot_be_launched_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=message):
        dist.launch(print, **options)  # type: ignore[arg-type]  # which is the point


@pytest.mark.slow
def test_machines_need_not_be_started_in_order() -> None:
    """Two machines that are one: both come to the port of the first."""
    url = f"tcp://127.0.0.1:{free_port()}"
    ended: dict[int, list[list[int]]] = {}

    def machine(number: int) -> None:
        job = lambda: [dist.get_rank(), rw.all_reduce(1), rw.get_num_nodes()]  # noqa: E731 - carried to the ranks
        ended[number] = dist.launch(job, 2, 2, number, url)

    machines = [threading.Thread(target=machine, args=[number]) for number in (1, 0)]
    for thread in machines:
        thread.start()
    for thread in machines:
        thread.join(200)
    assert ended == {0: [[0, 4, 2], [1, 4, 2]], 1: [[2, 4, 2], [3, 4, 2]]}


@pytest.mark.slow
def test_a_worker_may_be_started_by_hand() -> None:
    """As programs do that call `_job_worker` in processes of their own."""
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    workers = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "worker.py"), str(local_rank), url],
            env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for local_rank in range(2)
    ]  # fmt: skip
    ends = [worker.communicate(timeout=200) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ends
    assert [out for out, _ in ends] == [f"{rank} of 2: 3, met at {port} (from address)\n" for rank in range(2)]
