"""initialize, finalize and sync, with real processes: every way to meet, and every way in which that goes wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.compat.ignite._initialize import UnusableEnvironmentError
from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

PROGRAM = str(Path(__file__).parents[1] / "programs" / "ignite_join.py")


def run(how: str, environs: list[dict[str, str]], **arguments: object) -> list[dict[str, Any]]:
    ended = run_ranks(PROGRAM, environs, how, json.dumps(arguments))
    for process in ended:
        assert process.returncode == 0, process.stderr
    return [json.loads(process.stdout) for process in ended]


def refused(environs: list[dict[str, str]], **arguments: object) -> list[str]:
    ended = run_ranks(PROGRAM, environs, "initialize", json.dumps(arguments))
    for process in ended:
        assert process.returncode == 1, process.stdout
        assert "Traceback" not in process.stderr
    return [process.stderr for process in ended]


def check(reports: list[dict[str, Any]], *, hook: bool = True) -> None:
    size = len(reports)
    for rank, report in enumerate(reports):
        assert report["before"] == 0, "as the original says before it has joined"
        assert [report[name] for name in ("rank", "world_size", "local_rank", "nproc_per_node")] == [
            rank,
            size,
            rank,
            size,
        ]
        assert (report["nnodes"], report["node_rank"], report["total"]) == (1, 0, size)
        assert (report["backend"], report["model"], report["device"]) == ("gloo", "native-dist", "cpu")
        assert report["left"] == [False, "serial", 1, hook]
        assert report["environment is as it was"]


@pytest.mark.parametrize("backend", variants(["gloo", "cpu:gloo"], slow=["cpu:gloo"]))
def test_initialize_joins_what_the_launcher_names(backend: str) -> None:
    port = free_port()
    check(run("initialize", [plain(rank, 2, port) for rank in range(2)], backend=backend, timeout=100))


def test_initialize_alone_makes_a_world_of_one() -> None:
    check(run("initialize", [{}], backend="gloo"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_set_by_hand_meet_on_this_host(world_size: int) -> None:
    numbers = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)} for rank in range(world_size)
    ]
    port = {"MASTER_PORT": str(free_port())} if world_size > 1 else {}
    check(run("initialize", [environ | port for environ in numbers], backend="gloo", timeout=100))


def test_initialize_over_tcp() -> None:
    """The original refuses it: it would hang there."""
    method = f"tcp://127.0.0.1:{free_port()}"
    check(
        run(
            "initialize",
            [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)],
            backend="gloo",
            init_method=method,
        )
    )


def test_initialize_through_a_file(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meeting"
    check(
        run(
            "initialize",
            [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)],
            backend="gloo",
            init_method=method,
        )
    )


def test_variables_that_cannot_be_joined_by_are_both_kinds_of_error() -> None:
    """Ignite raises RuntimeError where some are missing, and ValueError where one is no number."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    for environ in ({"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, slurm):
        (error,) = refused([environ], backend="gloo")
        assert error.startswith("UnusableEnvironmentError")
    assert issubclass(UnusableEnvironmentError, rw.LauncherEnvironmentError)
    assert issubclass(UnusableEnvironmentError, RuntimeError)


def test_rank_and_world_size_may_be_arguments(tmp_path: Path) -> None:
    for place in ({"init_method": f"file://{tmp_path}/meeting?rank=0&world_size=1"}, {"rank": 0, "world_size": 1}):
        check(run("initialize", [{}], backend="gloo", **place))


def test_torchrun_in_a_slurm_allocation_keeps_its_local_ranks() -> None:
    """The original takes LOCAL_RANK from SLURM_LOCALID wherever there is SLURM_JOB_ID."""
    port = free_port()
    for more in ({}, {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}):
        environs = [
            plain(rank, 2, port, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", SLURM_JOB_ID="7", **more)
            for rank in range(2)
        ]
        check(run("initialize", environs, backend="gloo"))


@pytest.mark.parametrize("address", ["127.0.0.1", "file"])
def test_getters_of_a_group_that_others_opened_never_talk(address: str, tmp_path: Path) -> None:
    """Rank zero alone asks, which in the original waits for the others for ever."""
    method = f"file://{tmp_path}/meeting" if address == "file" else f"tcp://{address}:{free_port()}"
    environs = [{"TRUE_RANK": str(rank), "TRUE_SIZE": "2"} for rank in range(2)]
    zero, one = run("torch", environs, backend="gloo", init_method=method)
    assert (zero["rank"], zero["world_size"]) == (0, 2)
    places = [zero[name] for name in ("local_rank", "nproc_per_node", "nnodes", "node_rank")]
    if address == "file":
        assert ["cannot be known: the process group was opened by other code" in place for place in places] == [
            True
        ] * 4
    else:
        assert places == [0, 2, 1, 0], "nobody comes to loopback from another host"
    for rank, report in enumerate((zero, one)):
        assert report["after sync"]["local_rank"] == rank
        assert report["after sync"]["nproc_per_node"] == 2
        assert report["total"] == 2


def test_a_hint_is_believed_until_the_end(tmp_path: Path) -> None:
    environs = [{"TRUE_RANK": str(rank), "TRUE_SIZE": "2", "HINT": str(1 - rank)} for rank in range(2)]
    zero, one = run("torch", environs, backend="gloo", init_method=f"file://{tmp_path}/meeting", hint=True)
    assert zero["local_rank"] == zero["after sync"]["local_rank"] == 1
    assert one["after sync"]["local_rank"] == 0


def test_ranks_that_never_arrive_are_named() -> None:
    (error,) = refused([plain(0, 2, free_port())], backend="gloo", timeout=1)
    assert error.startswith("JoinTimeoutError: rank 1 of 2 did not arrive within 1 s")


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_file_is_waited_for_in_vain(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    (error,) = refused([environ], backend="gloo", timeout=1, init_method=f"file://{tmp_path}/meeting")
    assert "JoinError: rank 0 of 2 did not meet the others in" in error
    assert "within 1 s" in error


@pytest.mark.slow
def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        zero, one = refused([plain(rank, 2, port) for rank in range(2)], backend="gloo", timeout=2)
    assert "rank zero cannot listen" in zero
    assert f"the listener on port {port} is not rank zero of this world" in one


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"RANK": "1"}, {}, "WORLD_SIZE is not set, but RANK=1 is"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK='x' is not a whole number"),
        ({}, {"master_port": 1}, "initialize takes no master_port; it takes timeout, init_method, rank"),
        ({}, {"backend": "nccl"}, "Backend should be one of '('gloo',)', which this host can use; got 'nccl'"),
        ({}, {"backend": "cpu:nope"}, "is not in this build of torch"),
        ({}, {"init_method": "udp://host"}, "is none of env://, tcp://host:port, file:///path"),
        ({}, {"init_method": "tcp://host", "rank": 0, "world_size": 2}, "is not host:port"),
        ({}, {"init_method": "tcp://h:1?rank=x"}, "is not a whole number"),
        ({}, {"init_method": "file:///nowhere", "rank": 0}, "Both rank and world_size should be provided"),
        ({}, {"rank": 0}, "given rank=0 and world_size=None; pass both, or neither"),
        ({}, {"device_id": "nonsense"}, "is no device"),
    ],
)
def test_what_cannot_be_is_refused(environ: dict[str, str], arguments: dict[str, object], message: str) -> None:
    (error,) = refused([environ], **({"backend": "gloo"} | arguments))
    assert message in error
