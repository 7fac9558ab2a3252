"""Checkpoints: what is loaded is what was saved, whatever fails on which rank."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard

import rankwise as rw
from rankwise._comm.group import Group
from rankwise._training import folder_owner
from rankwise._training.checkpoint_files import valid_checkpoints
from rankwise._training.folder_owner import FolderOwner
from rankwise.testing._plugin.leaks import RandomState
from tests.session.worlds import clean_environ
from tests.tables import each_row

PROGRAM = str(Path(__file__).parent / "programs" / "save_often.py")
BIN = Path(sys.executable).parent
SECONDS = 200


@pytest.fixture(autouse=True)
def what_a_test_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch would set
    state = RandomState()
    yield
    state.restore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that all ranks of the test have."""
    return Path(rw.broadcast(str(tmp_path)))


def trained(seed: int, wrap: str = "plain") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a module and an optimizer with a state."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    if wrap == "fsdp":
        fully_shard(model)
    if wrap == "ddp":
        model = rw.wrap_ddp(model)
    if wrap == "compiled":
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that a checkpoint has of them, as lists."""
    state = optimizer.state_dict()
    tensors = [*model.state_dict().values(), *(value for entry in state["state"].values() for value in entry.values())]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in tensors]
    return [state["param_groups"], *(value.tolist() for value in whole)]


@pytest.mark.ranks("serial", 1, 2)
@pytest.mark.parametrize("async_op", [False, True])
def test_all_kinds_of_values_come_back(comm: Group, folder: Path, async_op: bool) -> None:
    rank = rw.get_rank()
    model, optimizer = trained(0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the generator that programs share
    torch.manual_seed(rank)
    before = state_of(model, optimizer)
    with rw.Checkpoints(folder / "runs") as saves:
        assert saves.load(model=model) is None
        saves.save(
            3, async_op=async_op, model=model, optimizer=optimizer, schedule=schedule, best=rank, names=("a", {"b": 1})
        )
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311, NPY002
        train(model, optimizer)
        schedule.step()
        other, of_other = trained(1)
        other_schedule = torch.optim.lr_scheduler.StepLR(of_other, 5)
        assert saves.load(model=other, optimizer=of_other, schedule=other_schedule) == 3
        assert saves.values == {"best": 0, "names": ("a", {"b": 1})}
    assert state_of(other, of_other) == before
    assert (other_schedule.step_size, other_schedule.last_epoch) == (10, 0)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: S311, NPY002
    assert len(set(rw.all_gather(drawn))) == comm.size


@pytest.mark.ranks(2)
@each_row("wrap", ["plain", "ddp", "compiled", "fsdp"], collective=True)
def test_wrappers_make_no_difference(comm: Group, folder: Path, wrap: str) -> None:
    model, optimizer = trained(0, wrap)
    before = state_of(model, optimizer)
    with rw.Checkpoints(folder / wrap) as saves:
        saves.save(1, model=model, optimizer=optimizer)
        found = FileSystemReader(valid_checkpoints(folder / wrap)[0]).read_metadata().state_dict_metadata
        names = {name for name in found if name.startswith("model/")}
        assert names == {f"model/{name}" for name in trained(0)[0].state_dict()}
        for other in ("plain", "ddp", "fsdp"):
            loaded = trained(1, other)
            assert saves.load(model=loaded[0], optimizer=loaded[1]) == 1
            assert state_of(*loaded) == before


@pytest.mark.ranks(2)
def test_an_optimizer_without_a_state_stays_so(comm: Group, folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    with rw.Checkpoints(folder) as saves:
        saves.save(0, model=model, optimizer=optimizer)
        assert not optimizer.state
        other = torch.optim.Adam(model.parameters())
        saves.load(optimizer=other)
        assert (dict(other.state), other.param_groups[0]["lr"]) == ({}, 0.5)


@pytest.mark.ranks("serial", 2)
def test_the_last_ones_are_kept_in_the_order_of_saving(comm: Group, folder: Path) -> None:
    with rw.Checkpoints(folder, keep=2) as saves:
        for step in (5, 9, 2, 2):
            saves.save(step, async_op=step == 9, best=step)
        assert [path.name for path in valid_checkpoints(folder)] == ["step_2.2", "step_2.3"]
        assert saves.load() == 2
        rw.barrier()
        if rw.is_rank_zero():
            (folder / "step_2.3" / "complete").unlink()  # as if it had not been completed
            (folder / "step_7.4").mkdir()
        rw.barrier()
        assert saves.load() == 2
        saves.save(8)
        assert sorted(path.name for path in folder.iterdir()) == ["owner", "step_2.2", "step_8.5"]
        rw.barrier()  # rank zero gives the folder back at the end


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process write no file above some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Torch's writer, which is left after the error, flushes the file that is closed.
@pytest.mark.filterwarnings("ignore:Exception ignored .*_StorageWriterTransforms")
@pytest.mark.ranks(2)
@each_row("async_op", [False, True], collective=True)
def test_a_full_disk_on_one_rank_is_an_error_on_all(comm: Group, folder: Path, async_op: bool) -> None:
    for full in range(comm.size):
        model, optimizer = trained(0, "fsdp")
        with rw.Checkpoints(folder / f"{async_op}{full}") as saves:
            saves.save(1, model=model, optimizer=optimizer)
            kind = rw.RemoteRankError if rw.get_rank() != full else Exception
            with full_disk() if rw.get_rank() == full else nullcontext(), pytest.raises(kind) as caught:
                saves.save(2, async_op=async_op, model=model, optimizer=optimizer)
                saves.wait()
            assert rw.get_rank() == full or f"rank {full}" in str(caught.value)
            assert saves.load(model=model, optimizer=optimizer) == 1
            saves.save(3, model=model, optimizer=optimizer)
            assert saves.load(model=model, optimizer=optimizer) == 3
    del caught
    gc.collect()  # the writers, while that is ignored


@pytest.mark.ranks("serial", 2)
def test_mistakes_are_errors_on_all_ranks(comm: Group, folder: Path) -> None:
    model, optimizer = trained(0)
    on_zero = rw.is_rank_zero()
    other = Exception if on_zero else rw.RemoteRankError
    with rw.Checkpoints(folder) as saves:
        with pytest.raises(other, match=r"pickle|lambda"):
            saves.save(1, f=lambda: 0)
        with pytest.raises(rw.InvalidArgumentError if on_zero else rw.RemoteRankError, match="step=-1 is below 0"):
            saves.save(-1 if on_zero else 1)
        assert saves.load() is None
        saves.save(1, model=model, best=1)
        for objects, text in (
            ({"ema": model}, r"no 'ema', but model, best"),
            ({"best": 1}, r"best=1 has no load_state_dict"),
            ({"model": torch.nn.Linear(3, 5)}, r"'0.bias'.*[0-9]+ of their names differ"),
            ({"model": optimizer}, "9 parameters|0 parameters|invalid literal|state"),
        ):
            with pytest.raises(Exception, match=text):
                saves.load(**objects)
        wider = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        with pytest.raises(rw.InvalidArgumentError, match=r"'0.weight' has the shape \[5, 4\], and \[5, 3\]"):
            saves.load(model=wider)
        if comm.size > 1:
            with pytest.raises(rw.MismatchError, match="step"):
                saves.save(rw.get_rank())
        saves.save(2, model=model)


@each_row(("arguments", "text"), [((3,), "folder=3"), (("a", 0), "keep=0"), (("a", "b"), "keep='b'")])
def test_odd_arguments(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=text):
        rw.Checkpoints(arguments[0], keep=(*arguments, 3)[1])


def entry(**changes: object) -> dict[str, Any]:
    return {"job": "a", "attempt": 0, "beat": 0, **folder_owner._process(), **changes}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_owner, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(folder_owner, "_POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("fast")
def test_a_folder_has_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_owner, "_BEAT_SECONDS", 0.01)
    first, second = (FolderOwner(tmp_path, job=job, attempt=0) for job in ("a", "b"))
    first.take()
    first.take()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(folder_owner, "host_id", lambda: "another host")
        with pytest.raises(rw.InvalidArgumentError, match=f"process {os.getpid()} on .* of job a saves"):
            second.take()
        again = FolderOwner(tmp_path, job="a", attempt=1)
        again.take()  # the first one would have been ended
        with pytest.raises(rw.InvalidArgumentError, match="is in use"):
            first.take()
        first.release()
        again.release()
    assert not list(tmp_path.iterdir())
    second.take()
    (tmp_path / "owner").unlink()
    second.take()
    second.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fast")
@each_row("found", [{"pid": 2**22 + 1}, {"started": 1.0}, {"place": "another host"}, {}], ids=str)
def test_a_folder_is_free_after_its_owner(tmp_path: Path, found: dict[str, Any]) -> None:
    """Of a process that has ended, at once; of another host, after a silence; of this process, at once."""
    (tmp_path / "owner").write_text(json.dumps(entry(**found)))
    owner = FolderOwner(tmp_path, job="b", attempt=0)
    owner.take()
    owner.release()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.soak(100)
def test_what_is_left_after_sigkill_is_valid(mode: str, seed: int, tmp_path: Path) -> None:
    """Of all ranks or of one, at a random moment; what two ranks have saved is loaded by one."""
    rng = random.Random(seed)  # noqa: S311 - repeatable
    with subprocess.Popen(
        [str(BIN / "rankwise"), "launch", "-n", "2", PROGRAM, str(tmp_path / "runs"), mode],
        env=clean_environ(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        last = [process.stdout.readline() for _ in range(rng.randrange(2, 6))][-1]
        time.sleep(rng.random() * 0.1)
        owner = json.loads((tmp_path / "runs" / "owner").read_text())
        os.kill(rng.choice([owner["pid"], process.pid]), signal.SIGKILL)
        rest = process.stdout.read()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(owner["pid"]).wait(SECONDS)
    saved = int((rest.split() or last.split())[-1])
    model = torch.nn.Linear(40, 50)
    optimizer = torch.optim.Adam(model.parameters())
    with rw.Checkpoints(tmp_path / "runs", keep=1) as saves:
        step = saves.load(model=model, optimizer=optimizer)
        assert step is not None
        assert step >= saved - (mode == "async")  # without a launcher, ranks go on for a moment
        moments = [value["exp_avg"] for value in optimizer.state.values()]
        assert {float(value) for tensor in (*model.parameters(), *moments) for value in tensor.detach().flatten()} == {
            step
        }
        assert saves.values == {"step": step}
        saves.save(step)
    assert len(list((tmp_path / "runs").iterdir())) == 1
