"""What users see of rankwise's own frames: none in a "file:line", one or two in the traceback of one of its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group
from rankwise._session.session import summary_with_location
from rankwise._user_frames import raised_at
from tests.session.worlds import clean_environ


class Refuses:
    """Its pickling makes a call of rankwise's, which fails."""

    def __reduce__(self) -> tuple[object, ...]:
        rw.Topology(rank=9, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
        return Refuses, ()


def entries(call: Callable[[], Any]) -> list[traceback.FrameSummary]:
    """Return the traceback of one of rankwise's errors, from the call on."""
    with pytest.raises(rw.RankwiseError) as caught:
        call()
    found = traceback.extract_tb(caught.value.__traceback__)
    names = [entry.name for entry in found]
    return list(found[names.index("<lambda>") :])


@pytest.mark.ranks("serial", 2)
@pytest.mark.usefixtures("torch_random")
def test_errors_of_rankwise_end_where_the_user_called(comm: Group) -> None:
    rank, group = comm.rank or 0, rw.new_group(range(comm.size))
    calls: dict[str, Callable[[], object]] = {
        "barrier": lambda: rw.barrier(timeout=-1),
        "all_reduce": lambda: rw.all_reduce(object()),
        "gather": lambda: rw.gather(1, dst=9),
        "new_group": lambda: rw.new_group([99]),
        "all_gather": lambda: rw.all_gather(one for one in [1]),
        "reduce": lambda: rw.reduce(1, "sun"),
        "all_to_all": lambda: rw.all_to_all(1),  # type: ignore[call-overload]  # that is the point
        "reduce_scatter": lambda: rw.reduce_scatter([]),
        "scatter": lambda: rw.scatter([1], group=[0]),  # type: ignore[call-overload]  # that is the point
    }
    if comm.size > 1:
        calls |= {
            "sync_params": lambda: rw.sync_params(torch.nn.Linear(1 + rank, 1)),
            "all_gather_cat": lambda: rw.all_gather_cat(torch.ones(1, 1 + rank)),
            "all_reduce_": lambda: rw.all_reduce_(torch.ones(1 + rank)),
            "broadcast": lambda: rw.broadcast(1) if rank else rw.barrier(),
            "close": lambda: group.close() if rank else rw.barrier(group=group),
        }
    for name, call in calls.items():
        user, *ours = entries(call)
        assert user.filename == __file__
        assert ours[0].name in {name, "barrier"}
        assert len(ours) <= 2, [entry.name for entry in ours]


@pytest.mark.ranks(2)
def test_frames_of_the_user_stay_wherever_they_are(comm: Group) -> None:
    with pytest.raises(rw.RankwiseError) as caught:
        rw.all_gather(Refuses() if comm.rank == 0 else 1)
    if comm.rank == 0:
        cause = caught.value.__cause__
        assert isinstance(cause, rw.TopologyError)
        assert "__reduce__" in [entry.name for entry in traceback.extract_tb(cause.__traceback__)]
    assert rw.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_an_error_that_is_not_rankwises_keeps_all_frames(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    group = rw.new_group([0, 1])  # which is lost by it
    monkeypatch.setattr(comm_of(group).control, "agree", broken)
    with pytest.raises(KeyError) as caught:
        rw.barrier(group=group)
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-4:] == ["barrier", "verify", "agree", "broken"]


@pytest.mark.ranks(2)
def test_places_in_messages_are_the_users(comm: Group) -> None:
    with pytest.raises(rw.MismatchError) as caught:
        rw.barrier(f"epoch {comm.rank}")
    line = caught.value.__traceback__ and caught.value.__traceback__.tb_lineno
    assert raised_at(caught.value) == f"test_user_frames.py:{line}"
    assert summary_with_location(caught.value).endswith(f"(test_user_frames.py:{line})")
    assert summary_with_location(rw.RankwiseError("never raised")) == "RankwiseError: never raised"


@pytest.mark.slow
def test_development_mode_shows_all_frames(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import rankwise as rw\nrw.gather(1, dst=9)\n")
    ended = subprocess.run(
        [sys.executable, "-X", "dev", str(program)],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert "InvalidArgumentError: dst=9 is not a member" in ended.stderr
    assert "in group_rank_of" in ended.stderr


def unusable() -> None:
    raise ValueError("bad")


@pytest.mark.parametrize(
    "call",
    [lambda: rw.init(device="nosuch"), lambda: rw.launch(unusable, nproc=1), lambda: rw.launch(unusable, nproc=0)],
    ids=["init", "launch", "launch with a wrong argument"],
)
def test_errors_of_init_and_launch_end_at_the_call(call: Callable[[], object]) -> None:
    with pytest.raises(rw.RankwiseError) as caught:
        call()
    files = [Path(entry.filename).name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert files == ["test_user_frames.py", "test_user_frames.py", "_user_frames.py"]
    assert caught.value.__cause__ is None or caught.value.__cause__.__traceback__ is None


def test_an_error_in_another_package_is_at_the_line_of_the_program() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert raised_at(caught.value) == f"test_user_frames.py:{caught.traceback[0].lineno + 1}"


def interrupt_itself() -> None:
    with rw.init(device="cpu"):
        if rw.is_rank_zero():
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            signal.pause()
        rw.barrier()


def test_an_interrupted_collective_is_reported_at_its_call() -> None:
    with pytest.raises(rw.RankFailedError, match=r"rank 0 of 2 .* raised KeyboardInterrupt") as caught:
        rw.launch(interrupt_itself, nproc=2)
    assert lines_of(caught.value)[-2:] == ["    rw.barrier()", "KeyboardInterrupt"]


def lines_of(error: rw.RankFailedError) -> list[str]:
    """Return the lines of the first traceback; newer Pythons mark a call below its line."""
    return [line for line in error.failures[0].traceback.splitlines() if line.strip(" ~^")]


def gather_lock() -> None:
    rw.init(device="cpu")
    rw.all_gather(threading.Lock())


def test_the_report_on_a_rank_shows_the_call_and_no_frame_of_rankwise() -> None:
    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(gather_lock, nproc=2)
    trace, call, source, error = lines_of(caught.value)
    assert trace == "Traceback (most recent call last):"
    assert call == f'  File "{__file__}", line {gather_lock.__code__.co_firstlineno + 2}, in gather_lock'
    assert source == "    rw.all_gather(threading.Lock())"
    assert error.startswith(
        "rankwise.errors.PayloadTypeError: a lock cannot be sent to other ranks, since it cannot be"
    )
