"""init_dist: the launchers it reads, the environment afterwards, and the errors of ranks that cannot join."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import Any

import pytest

from tests.compat.adapted import PROGRAMS
from tests.session.worlds import free_port, plain, run_ranks

JOIN = str(PROGRAMS / "join_mmcv.py")


def slurm(rank: int, size: int, **more: str) -> dict[str, str]:
    """Return the variables that srun sets for the tasks of one node."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "9",  # the job's, which is not the step's
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "node[0-1]",
        **more,
    }


def openmpi(rank: int, size: int) -> dict[str, str]:
    """Return the variables that mpirun sets on one host."""
    own = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()} | {"PMIX_NAMESPACE": "test-ns"}


def join(environs: list[dict[str, str]], launcher: str, **options: object) -> list[subprocess.CompletedProcess[str]]:
    return run_ranks(JOIN, environs, launcher, json.dumps(options))


def joined(ends: list[subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """Return the reports of ranks, once the properties that all launchers share are checked."""
    assert [end.returncode for end in ends] == [0] * len(ends), ends
    reports = [json.loads(end.stdout) for end in ends]
    size = len(reports)
    for rank, report in enumerate(reports):
        assert (report["rank"], report["size"], report["total"]) == (rank, size, size)
        assert (report["RANK"], report["WORLD_SIZE"], report["LOCAL_RANK"]) == (str(rank), str(size), str(rank))
        assert (report["MASTER_ADDR"], report["MASTER_PORT"]) == ("127.0.0.1", reports[0]["MASTER_PORT"])
        assert report["start method"] is None, "the original sets it to spawn for good"
    return reports


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("launcher", ["pytorch", "auto"])
def test_variables_set_by_hand(launcher: str, size: int) -> None:
    port = free_port()
    reports = joined(join([plain(rank, size, port) for rank in range(size)], launcher))
    assert reports[0]["MASTER_PORT"] == str(port)


@pytest.mark.parametrize("launcher", ["slurm", "auto"])
def test_slurm(launcher: str) -> None:
    """Of the job's tasks, nine, two are in this step; there are more tasks here than GPUs, and none of these."""
    reports = joined(join([slurm(rank, 2) for rank in range(2)], launcher))
    assert int(reports[0]["MASTER_PORT"]) > 0


def test_slurm_with_a_port_of_ones_own() -> None:
    port = free_port()
    reports = joined(join([slurm(rank, 2) for rank in range(2)], "slurm", port=port, timeout=100))
    assert reports[0]["MASTER_PORT"] == str(port)


def test_mpi() -> None:
    """That version of the original sets none of the variables that its process group wants."""
    joined(join([openmpi(rank, 2) for rank in range(2)], "mpi"))


def test_options_of_process_groups_are_taken() -> None:
    port = free_port()
    ends = [plain(0, 2, port) | {"SLURM_PROCID": "0"}, plain(1, 2, port)]
    joined(join(ends, "pytorch", init_method="env://", backend="gloo"))


def test_one_launcher_inside_another() -> None:
    """What is asked for is believed: the step's variables, and not those that it inherited."""
    inherited = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    joined(join([slurm(rank, 2) | inherited for rank in range(2)], "slurm"))


def test_one_of_rank_and_world_size_may_be_given() -> None:
    """The other is in its variable, as for torch. And the backend may be torch's choice."""
    port = free_port()
    environs = [plain(rank, 7, port, LOCAL_RANK=str(rank)) for rank in range(2)]
    joined(join(environs, "pytorch", world_size=2, backend=None))


def test_none_joins_nothing() -> None:
    (end,) = join([{}], "none")
    reports = json.loads(end.stdout)
    assert (reports["RANK"], reports["rank"], reports["size"]) == (None, 0, 1)


@pytest.mark.parametrize(
    ("launcher", "environ", "options", "message"),
    [
        (
            "torchrun",
            {},
            {},
            "InvalidArgumentError: Invalid launcher type: torchrun; it is none of pytorch, mpi, slurm, auto, none",
        ),
        ("pytorch", {}, {}, "launcher='pytorch', but this process shows no sign of it, and was started by 'none'"),
        ("pytorch", {"OMPI_COMM_WORLD_RANK": "0"}, {}, "started by 'openmpi'; start it with torchrun, or set RANK"),
        ("mpi", {"RANK": "0", "WORLD_SIZE": "1"}, {}, "start it with mpirun or mpiexec, or pass launcher='auto'"),
        ("slurm", {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, {}, "start it with srun"),
        ("pytorch", {"RANK": "1"}, {}, "WORLD_SIZE is not set, but RANK=1 is"),
        ("pytorch", {"RANK": "zero", "WORLD_SIZE": "2"}, {}, "RANK='zero' is not a whole number"),
        ("pytorch", {"RANK": "2", "WORLD_SIZE": "2"}, {}, "rank 2 (from RANK) is not below world_size 2"),
        ("pytorch", {"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR and MASTER_PORT are not set"),
        ("auto", {"WORLD_SIZE": "2"}, {}, "RANK is not set, but WORLD_SIZE=2 is"),
        ("slurm", slurm(0, 2), {"port": 99999}, "MASTER_PORT=99999 is not a port"),
        ("pytorch", plain(0, 1, 1), {"port": 5}, "port=5, but plain sets the port: leave it out"),
        ("pytorch", plain(0, 1, 1), {"group": 5}, "init_dist does not take group; it takes timeout, port,"),
        ("pytorch", plain(0, 1, 1), {"init_method": "file:///x"}, "neither env:// nor tcp://host:port"),
        ("pytorch", plain(0, 1, 1), {"timeout": "soon"}, "timeout='soon' is not a number of seconds"),
        ("pytorch", plain(0, 1, 1), {"backend": "gluu"}, "backend='gluu': 'gluu' is not in this build"),
    ],
)
def test_what_cannot_be_joined_is_said(
    launcher: str, environ: dict[str, str], options: dict[str, object], message: str
) -> None:
    (end,) = join([environ], launcher, **options)
    assert end.returncode == 1
    assert message in end.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    (end,) = join([plain(0, 2, free_port())], "pytorch", seconds=2)
    assert end.returncode == 1
    assert "JoinTimeoutError: rank 1 of 2 did not arrive within 2 s" in end.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_on_all_ranks() -> None:
    """The ranks of the original each look for themselves, and choose another one each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first, second = join([slurm(rank, 2) for rank in range(2)], "slurm", port=port, timeout=3)
    assert f"rank zero cannot listen on 127.0.0.1:{port}" in first.stderr
    assert "JoinTimeoutError" in second.stderr
    assert f"the listener on port {port} is not rank zero of this world" in second.stderr
