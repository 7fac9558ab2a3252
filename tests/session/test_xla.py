"""Sessions on XLA devices without torch_xla: what is refused, and processes that meet. `tests/xla` has real devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

import rankwise as rw
from rankwise import _torch_xla
from rankwise._environment.xla_processes import MeetingPlace, meeting_place
from tests.session.worlds import free_port

HAS_TORCH_XLA = _torch_xla.is_installed()


@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla is installed")
@pytest.mark.parametrize(
    "start",
    [
        lambda: rw.init(backend="xla"),
        lambda: rw.init(device="xla"),
        lambda: rw.init(device=torch.device("xla", 1)),
        lambda: rw.launch(print, backend="xla"),
    ],
    ids=["backend", "device", "torch.device", "launch"],
)
def test_the_missing_package_is_named(start: object) -> None:
    with pytest.raises(rw.MissingDependencyError, match="install the torch_xla of this torch's version") as caught:
        start()  # type: ignore[operator]
    assert caught.value.name == "torch_xla"


@pytest.mark.parametrize("arguments", [{"nproc": 0}, {"nproc": "two"}, {"nproc": True}, {"nodes": "two"}], ids=str)
def test_arguments_of_a_launch_on_devices_are_checked(arguments: dict[str, object]) -> None:
    with pytest.raises(rw.InvalidArgumentError):
        rw.launch(print, backend="xla", **arguments)  # type: ignore[arg-type]


def test_launch_has_no_other_backend() -> None:
    with pytest.raises(rw.InvalidArgumentError, match=r"backend='gloo': launch has only 'xla'"):
        rw.launch(print, nproc=1, backend="gloo")


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(rw.InvalidArgumentError, match="backend='xla' has none for device='cpu'"):
        rw.init(backend="xla", device="cpu")


@pytest.mark.slow
def test_nothing_of_torch_xla_is_imported() -> None:
    program = """
import sys
sys.modules["torch_xla"] = None  # an import would fail
import rankwise
rankwise.get_rank(), rankwise.device()
with rankwise.init():
    rankwise.all_reduce(rankwise.all_gather(1)[0])
assert rankwise.launch(rankwise.get_rank, nproc=1) == [0]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ("127.0.0.1", 29421, True)),
        ({"CLOUD_TPU_TASK_ID": "3"}, ("127.0.0.1", 29421, False)),
        ({"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"}, ("127.0.0.1", 1234, True)),
        ({"MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("127.0.0.1", 29421, True)),
    ],
    ids=str,
)
def test_where_processes_of_one_host_meet(environ: Mapping[str, str], place: tuple[str, int, bool]) -> None:
    host, port, is_served_here = place
    found = meeting_place(environ, one_host=True, process_index=0)
    assert found == MeetingPlace(host=host, port=port, is_served_here=is_served_here)


def test_where_processes_of_a_pod_meet() -> None:
    pod = {"TPU_PROCESS_ADDRESSES": "10.0.0.2:8476,10.0.0.2:8477,10.0.0.3:8476", "CLOUD_TPU_TASK_ID": "0"}
    assert meeting_place(pod, one_host=False, process_index=2) == MeetingPlace(
        host="10.0.0.2", port=29421, is_served_here=True
    )
    workers = {"TPU_WORKER_HOSTNAMES": "node1,node2"}
    assert meeting_place(workers, one_host=False, process_index=1).host == "node1"
    slices = {"MEGASCALE_COORDINATOR_ADDRESS": "first:8080", "MEGASCALE_SLICE_ID": "1", "CLOUD_TPU_TASK_ID": "0"}
    assert meeting_place(workers | slices, one_host=False, process_index=0) == MeetingPlace(
        host="first", port=29421, is_served_here=False
    )
    assert meeting_place(pod | {"MASTER_ADDR": "mine"}, one_host=False, process_index=0).host == "mine"
    with pytest.raises(rw.LauncherEnvironmentError, match="MASTER_ADDR"):
        meeting_place({}, one_host=False, process_index=0)
    with pytest.raises(rw.LauncherEnvironmentError, match="MASTER_PORT"):
        meeting_place({"MASTER_PORT": "99999"}, one_host=True, process_index=0)


def as_process_of_torch_xla(port: int, world_size: int | None = None) -> None:
    """Let torch_xla have a device for this process, which the launcher's rank is the rank of."""
    os.environ["MASTER_PORT"] = str(port)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    rank, size = rw.get_rank(), world_size or rw.get_world_size()
    position = _torch_xla.DevicePosition(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        node_rank=0,
        num_processes=size,
        process_index=size - 1 - rank,  # devices are not numbered as processes are
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(_torch_xla, "require_torch_xla", lambda _: None)
    patch.setattr(_torch_xla, "device", lambda: torch.device("xla", 0))
    patch.setattr(_torch_xla, "device_kind", lambda: "TPU")
    patch.setattr(_torch_xla, "position", lambda: position)


def join_twice(port: int) -> list[object]:
    as_process_of_torch_xla(port)
    found: list[object] = []
    for _ in range(2):
        with rw.init(backend="xla", timeout=100.0) as session:
            reduced = rw.all_reduce(torch.arange(5000))
            found += [session.backend, str(session.device), rw.all_gather(session.rank), reduced[-1].item()]
            with rw.new_group([0, 1]) as group:
                if group.rank is not None:
                    assert rw.all_reduce(1, group=group) == 2
            if session.rank == 1:
                rw.store().set("key", "text")
        if session.rank == 0:
            found.append("left")
    return found


def test_processes_meet_in_the_store_of_the_first_one() -> None:
    expected = ["xla", "xla:0", [0, 1, 2], 3 * 4999]
    first, *others = rw.launch(join_twice, free_port(), nproc=3)
    assert others == [2 * expected] * 2
    assert first == 2 * [*expected, "left"]


def join_without_the_last(port: int) -> str:
    as_process_of_torch_xla(port)
    if rw.get_rank() == 1:
        return ""
    with pytest.raises(rw.JoinTimeoutError) as caught:
        rw.init(backend="xla", timeout=1.0)
    return str(caught.value)


@pytest.mark.slow
def test_processes_that_do_not_come_are_named() -> None:
    first, second, third = rw.launch(join_without_the_last, free_port(), nproc=3)
    assert second == ""
    for text in (first, third):
        assert "rank 1 of 3 did not arrive within 1 s" in text


def join_another_world(port: int) -> str:
    as_process_of_torch_xla(port, world_size=1)
    with pytest.raises(rw.JoinError) as caught:
        rw.init(backend="xla", timeout=100.0)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_of_a_launcher_that_torch_xla_does_not_connect() -> None:
    texts = rw.launch(join_another_world, free_port(), nproc=2)
    assert all("of 2 (from WORLD_SIZE), but torch_xla has it as rank" in text for text in texts)
    assert all("rankwise.launch(fn, backend='xla')" in text for text in texts)
