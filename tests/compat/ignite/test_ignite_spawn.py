"""spawn and Parallel: functions sent to new processes, their results and failures, and no process left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankwise as rw
import rankwise.compat.ignite as idist
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port, plain, run_ranks

PROGRAMS = Path(__file__).parents[1] / "programs"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("nproc", variants([1, 2, 4], fast=[2], slow=[]))
def test_spawn_runs_a_function_in_ranks(nproc: int, tmp_path: Path) -> None:
    """A closure, which the original cannot carry; it has nothing to return."""

    def mark(local_rank: int, prefix: str, *, suffix: str) -> str:
        total = idist.all_reduce(torch.tensor([local_rank])).item()
        place = (idist.get_rank(), idist.get_world_size(), idist.get_nproc_per_node(), idist.backend(), total)
        (tmp_path / f"{prefix}{place}{suffix}").touch()
        return "dropped"

    idist.spawn("gloo", mark, ("<",), {"suffix": ">"}, nproc_per_node=nproc)
    wanted = [f"<{(rank, nproc, nproc, 'gloo', sum(range(nproc)))}>" for rank in range(nproc)]
    assert names(tmp_path) == wanted


def test_parallel_spawns_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mark(local_rank: int, folder: Path, *, word: str) -> None:
        (folder / f"{local_rank} {word} {idist.model_name()}").touch()

    two: Any = np.int64(2)
    with idist.Parallel("gloo", nproc_per_node=two, start_method="spawn", daemon=True, timeout=100) as parallel:
        parallel.run(mark, tmp_path, word="ran")
        assert idist.model_name() == "serial", "this process is no rank"
    assert names(tmp_path) == ["0 ran native-dist", "1 ran native-dist"]
    logged = capsys.readouterr().err
    for text in ("Initialized distributed launcher with backend: 'gloo'", "\tnproc_per_node: 2\n", "' in 2 processes"):
        assert text in logged
    assert logged.endswith("ignite.distributed.launcher.Parallel INFO: End of run\n")


@pytest.mark.slow
def test_two_worlds_at_a_time_do_not_meet() -> None:
    """The original's both want port 2222."""

    def check(_: int) -> None:
        assert idist.all_reduce(1) == 2

    threads = [threading.Thread(target=idist.spawn, args=("gloo", check, (), None, 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_join_false_comes_back_at_once(tmp_path: Path) -> None:
    def wait(_: int) -> None:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        (tmp_path / "went").touch()

    idist.spawn("gloo", wait, (), nproc_per_node=1, join=False)
    (tmp_path / "go").touch()
    for thread in threading.enumerate():
        if thread.name == "rankwise-spawn":
            thread.join()
    assert names(tmp_path) == ["go", "went"]


@pytest.mark.slow
def test_the_failing_rank_is_named_and_its_error_the_cause() -> None:
    def fail(local_rank: int) -> None:
        if local_rank == 1:
            raise KeyError("no such thing")
        idist.barrier()

    before = dict(os.environ)
    with pytest.raises(rw.RankFailedError, match="raised KeyError") as caught:
        idist.spawn("gloo", fail, (), nproc_per_node=2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert dict(os.environ) == before


@pytest.mark.slow
def test_a_killed_rank_ends_the_others() -> None:
    def die(local_rank: int) -> None:
        if local_rank == 0:
            os.kill(os.getpid(), 9)
        idist.barrier()

    with pytest.raises(rw.RankFailedError, match="was killed by SIGKILL"):
        idist.spawn("gloo", die, (), nproc_per_node=2)


@pytest.mark.parametrize("how", variants(["master_addr", "init_method"], slow=["master_addr"]))
def test_two_hosts_meet(how: str, tmp_path: Path) -> None:
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "ignite_meets.py"), str(node), port, how],
            env=clean_environ(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    ends = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    lines = sorted(line.partition("] ")[2] for out, _ in ends for line in out.splitlines())
    assert lines == [f"hello {rank} {rank % 2} 4 6 {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "Argument node_rank should be between 0 and 1, but given 2"),
        ({"nnodes": 0}, "Argument nnodes should positive, a whole number, but given 0"),
        (
            {"nnodes": 2, "node_rank": 0},
            "arguments master_addr and master_port should be specified, a free port of the first host",
        ),
        (
            {"master_addr": "h", "init_method": "file:///shared"},
            "master_addr should be None if init_method is provided",
        ),
        ({"master_port": 1, "init_method": "file:///shared"}, "master_port should be None if init_method is provided"),
        ({"nnodes": 2, "node_rank": 0, "init_method": "file:///shared"}, "init_method='file:///shared'"),
        ({"init_method": "h:1"}, "is none of env://, tcp://host:port, file:///path"),
        ({"timeout": "soon"}, "timeout='soon' is neither a timedelta nor a number"),
        ({"hosts": 2}, "spawn takes no hosts; for gloo and nccl: nnodes, node_rank"),
        ({"nproc_per_node": 0}, "Argument nproc_per_node should positive, a whole number, but given 0"),
        ({"fn": threading.Lock()}, "cannot be carried to other processes"),
    ],
)
def test_what_cannot_be_spawned_is_refused(arguments: dict[str, Any], message: str) -> None:
    fn = arguments.get("fn", print)
    more: dict[str, Any] = {"nproc_per_node": 1} | {name: value for name, value in arguments.items() if name != "fn"}
    with pytest.raises(ValueError, match=re.escape(message)):
        idist.spawn("gloo", fn, (), **more)
    with pytest.raises(ValueError, match=re.escape(message)), idist.Parallel("gloo", **more) as parallel:
        parallel.run(fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2}, "If number of nodes larger than one, arguments node_rank should be given"),
        ({"nnodes": -1}, "Argument nnodes should positive, a whole number, but given -1"),
        ({"nnodes": True}, "Argument nnodes should positive, a whole number, but given True"),
        ({"nnodes": 2, "node_rank": 2}, "Argument node_rank should be between 0 and 1, but given 2"),
        ({"nnodes": 2, "node_rank": 1}, "arguments master_addr and master_port should be specified"),
        ({"nproc_per_node": -1}, "Argument nproc_per_node should positive, a whole number, but given -1"),
        ({"init_method": "tcp://127.0.0.1:1"}, "will hang. To fix this, please configure MASTER_ADDR and MASTER_PORT"),
        ({"init_method": "tcp://127.0.0.1:1", "nproc_per_node": None}, "will hang. To fix this"),
    ],
)
def test_parallel_is_refused_before_its_block_begins(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        idist.Parallel("gloo", **({"nproc_per_node": 1} | arguments))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "rank 1 left with ValueError: the loss is not a number"),
        ("kill", "rank 1"),
        ("leave", "rank 1 left the session"),
        pytest.param("never come", "CollectiveTimeoutError", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_in_parallel_strands_nobody(fault: str, message: str) -> None:
    """However one rank fails, the others receive its error, and end."""
    port = free_port()
    environs = [plain(rank, 2, port) for rank in range(2)]
    zero, one = run_ranks(str(PROGRAMS / "ignite_fails.py"), environs, fault)
    assert zero.returncode == 1
    assert message in zero.stderr
    assert zero.stdout == "serial\n", "it has left"
    assert one.returncode == {"raise": 1, "kill": -9, "leave": 0, "never come": 1}[fault]
