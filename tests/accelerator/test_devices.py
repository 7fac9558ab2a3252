"""Which device a rank takes, and what ranks with other devices are told before anything hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from tests.accelerator.ranks import error_of, in_session, ramp
from tests.session.worlds import clean_environ


def each_rank(body: Callable[[int], Any], nproc: int = 2) -> list[Any]:
    return rw.launch(lambda: body(int(os.environ["RANK"])), nproc=nproc)


def join(**init: Any) -> str:
    def open_and_close() -> None:
        with rw.init(timeout=60.0, **init):
            pass

    return error_of(open_and_close)


def test_a_rank_that_sees_no_device_is_named() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return join()

    for error in each_rank(body):
        assert error.startswith("JoinError: the ranks have chosen different devices or backends (rank 0 on ")
        assert "simdev, backend 'cpu:gloo,simdev:simccl'; rank 1 on" in error
        assert "cpu, backend 'gloo'" in error


def test_ranks_that_pass_other_devices_are_named() -> None:
    for error in each_rank(lambda rank: join(device="cpu" if rank == 0 else None)):
        assert "the ranks have chosen different devices or backends (rank 0 on" in error


@pytest.mark.parametrize("visible", ["1", None])
def test_two_ranks_on_one_device_are_named(visible: str | None) -> None:
    def body(_: int) -> str:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        return join(device=None if visible else "simdev:1")

    index = 0 if visible else 1
    for error in each_rank(body):
        assert error.startswith("JoinError: ranks 0-1 on ")
        assert (
            f"have the same device, simdev:{index} (simdev-1), which 'cpu:gloo,simdev:simccl' does not allow" in error
        )
        assert "CUDA_VISIBLE_DEVICES" in error
        assert "device='cpu'" in error


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_one_device_is_enough_for_gloo(backend: str) -> None:
    def body(rank: int) -> list[float]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        with rw.init(device="cpu", backend=backend, timeout=60.0):
            found: list[float] = rw.all_reduce(ramp(torch.device("simdev", 0), rank)).tolist()
            return found

    assert each_rank(body) == [[1, 3, 5, 7]] * 2


@pytest.mark.parametrize("how", ["bound", "set", "local rank"])
def test_an_adopted_group_has_the_device_that_its_program_chose(how: str) -> None:
    def body(rank: int) -> list[Any]:
        device = torch.device("simdev", rank)
        if how == "set":
            torch.accelerator.set_device_index(rank)
        dist.init_process_group("cpu:gloo,simdev:simccl", device_id=device if how == "bound" else None)
        with rw.init() as session:
            sent: Any = {"x": ramp(device, rank)} if rank == 0 else None
            tensor = rw.broadcast(sent)["x"]
            found = [session.device, tensor.device, rw.all_reduce(ramp(device, rank)).tolist()]
        dist.destroy_process_group()
        return [*found, torch.simdev.contexts()]  # type: ignore[attr-defined]

    for rank, found in enumerate(each_rank(body)):
        device = torch.device("simdev", rank)
        assert found == [device, device, [1, 3, 5, 7], [rank]]


def gathered_on_one(x: torch.Tensor) -> torch.Tensor | None:
    parts = rw.gather(x, dst=1)
    return None if parts is None else torch.cat([part.cpu() for part in parts])


def dict_of_one(x: torch.Tensor, *, is_owner: bool) -> Any:
    return {"x": x} if is_owner else None


def test_the_device_before_joining_leaves_forks_able_to_use_devices() -> None:
    program = (
        "import os, torch, rankwise as rw\n"
        "assert str(rw.device()) == 'simdev:1'\n"
        "pid = os.fork()\n"
        "if pid == 0: torch.ones(1, device='simdev')\n"
        "else: raise SystemExit(os.waitpid(pid, 0)[1] != 0)\n"
    )
    environ = clean_environ(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", SIMDEV_DRIVER="1")
    subprocess.run([sys.executable, "-c", program], env=environ, timeout=200, check=True)


RAGGED: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "broadcast": lambda x, _: rw.broadcast(x),
    "broadcast of a dict": lambda x, rank: rw.broadcast(dict_of_one(x, is_owner=rank == 1), src=1)["x"],
    "all_gather of other lengths": lambda x, rank: torch.cat([part.cpu() for part in rw.all_gather(x[:rank])]),
    "all_gather of one": lambda x, rank: rw.all_gather(dict_of_one(x, is_owner=rank == 0))[0]["x"],
    "all_gather_cat": lambda x, rank: rw.all_gather_cat(x[:rank]),
    "gather": lambda x, _: gathered_on_one(x),
    "scatter": lambda x, rank: rw.scatter([x, x + 1] if rank == 0 else None),
    "all_to_all of other lengths": lambda x, rank: rw.all_to_all([x[:rank], x])[1],
}


@pytest.mark.parametrize("opened_by", ["rankwise", "torch"])
def test_tensors_on_a_device_in_a_session_on_the_cpu(opened_by: str) -> None:
    def body(rank: int) -> dict[str, Any]:
        if opened_by == "torch":
            dist.init_process_group("gloo")
        x = ramp(torch.device("simdev", rank), rank)
        found: dict[str, Any] = {}
        with rw.init(timeout=20.0, device="cpu"):
            for name, call in RAGGED.items():
                value = call(x, rank)
                found[name] = None if value is None else value.tolist()
        if opened_by == "torch":
            dist.destroy_process_group()
        return found

    first, second = each_rank(body)
    assert first.pop("gather") is None
    assert second.pop("gather") == [0, 1, 2, 3, 1, 2, 3, 4]
    assert first.pop("scatter") == [0, 1, 2, 3]
    assert second.pop("scatter") == [1, 2, 3, 4]
    assert first.pop("all_to_all of other lengths") == [1]
    assert second.pop("all_to_all of other lengths") == [1, 2, 3, 4]
    assert first == second
    assert first["broadcast"] == [0, 1, 2, 3]
    assert first["all_gather of other lengths"] == [1]


def test_every_collective_takes_tensors_of_the_device() -> None:
    def body(session: rw.Session) -> list[Any]:
        rank, device = session.rank, session.device
        x = ramp(device, rank)
        model = torch.nn.Linear(4, 2).to(device)
        model(x).sum().backward()
        rw.sync_params(model)
        rw.sync_grads(model)
        values = [call(x, rank) for call in RAGGED.values()]
        values += [rw.all_reduce(x, op="max"), rw.all_reduce({"x": x, "y": 1})["x"], rw.all_reduce_(x.clone())]
        values += [rw.reduce_scatter([x, x]), rw.all_gather(x, async_op=True).wait()[0], model.bias.grad]
        rw.assert_synced(model)
        if rank == 0:
            rw.send(x, dst=1)
            values.append(rw.recv(src=1))
        else:
            values.append(rw.recv(src=0))
            rw.send(x, dst=0)
        return [None if value is None else value.tolist() for value in values]

    first, second = in_session(body)
    assert first[8:13] == [[1, 2, 3, 4], [1, 3, 5, 7], [1, 3, 5, 7], [1, 3, 5, 7], [0, 1, 2, 3]]
    assert second[8:13] == first[8:13]
    assert (first[-1], second[-1]) == ([1, 2, 3, 4], [0, 1, 2, 3])


def test_results_are_on_the_cpu_of_the_process_that_has_launched() -> None:
    def run() -> Any:
        with rw.init() as session:
            x = ramp(session.device, session.rank)
            model = torch.nn.Linear(2, 2, device=session.device)
            return {"x": x, "model": model}

    before = torch.simdev.is_initialized()  # type: ignore[attr-defined]
    for rank, result in enumerate(rw.launch(run, nproc=2)):
        assert result["x"].device.type == next(result["model"].parameters()).device.type == "cpu"
        assert result["x"].tolist() == [rank, rank + 1, rank + 2, rank + 3]
    assert torch.simdev.is_initialized() == before  # type: ignore[attr-defined]


def test_the_cause_of_a_failure_is_on_the_cpu_too() -> None:
    def run() -> None:
        with rw.init() as session:
            raise ValueError(ramp(session.device, 0))

    with pytest.raises(rw.RankFailedError) as failed:
        rw.launch(run, nproc=1)
    assert failed.value.__cause__ is not None
    assert failed.value.__cause__.args[0].device.type == "cpu"


def test_a_preloaded_module_that_opens_a_device_is_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "opens.py").write_text("import torch\nX = torch.ones(2, device='simdev')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    monkeypatch.syspath_prepend(str(tmp_path))

    def run() -> float:
        import opens  # type: ignore[import-not-found]  # noqa: PLC0415 - made above

        return float(opens.X.sum().item())

    assert rw.launch(run, nproc=2, preload="opens") == [2.0, 2.0]
    assert "opens (initialized an accelerator)" in capfd.readouterr().err
