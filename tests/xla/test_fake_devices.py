"""Ranks that are threads, with the fake torch_xla: what depends on positions and threads, not on XLA tensors."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._session.current import reset_current
from rankwise._session.session import state_behind
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, NotJoinedError
from tests.xla.fake_devices import FAKE, fake_torch_xla, run_ranks


@pytest.mark.parametrize("devices", [2, 3])
def test_each_device_is_a_rank(devices: int) -> None:
    def rank() -> tuple[object, ...]:
        before = rw.get_rank(), rw.get_world_size(), rw.get_local_rank(), rw.get_local_world_size()
        with rw.init() as session:
            topology = session.topology
            assert before == (topology.rank, topology.world_size, topology.local_rank, topology.local_world_size)
            assert (topology.node_rank, topology.num_nodes) == (0, 1)
            assert state_behind(session).reading.launcher == "torch_xla"
            assert rw.device() == torch.device("xla", session.rank)
            assert rw.all_gather({"rank": session.rank}) == [{"rank": rank} for rank in range(devices)]
            assert rw.all_reduce(torch.tensor([session.rank])).tolist() == [sum(range(devices))]
            rw.barrier()
        return session.rank, rw.is_joined()

    with fake_torch_xla(devices):
        for _ in range(2):
            assert run_ranks(rank) == [(rank, False) for rank in range(devices)]


def test_an_error_of_one_thread_ends_the_others() -> None:
    raised: dict[int, str] = {}

    def rank() -> None:
        try:
            with rw.init():
                rw.all_reduce([1][rw.get_rank()] if rw.get_rank() == 1 else 1)
        except Exception as error:  # noqa: BLE001 - any of them is compared below
            raised[rw.get_rank()] = str(error)

    with fake_torch_xla(3):
        run_ranks(rank)
    assert raised[1] == "list index out of range"
    for other in (0, 2):
        assert "rank 1 left with IndexError: list index out of range" in raised[other]


def test_a_call_that_differs_is_an_error_in_every_thread() -> None:
    def rank() -> str:
        with rw.init():
            with pytest.raises(rw.MismatchError) as raised:
                rw.all_reduce(1, op="max") if rw.get_rank() else rw.all_reduce(1)
            assert rw.all_reduce(1) == 2
            return str(raised.value)

    with fake_torch_xla(2):
        one, two = run_ranks(rank)
    assert one == two


def test_a_thread_that_a_rank_starts_has_no_session() -> None:
    def rank() -> str:
        found: list[str] = []

        def call() -> None:
            with pytest.raises(NotJoinedError) as raised:
                rw.all_reduce(1)
            found.append(str(raised.value))

        with rw.init():
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            return found[0]

    with fake_torch_xla(2):
        texts = run_ranks(rank)
    assert all("has not joined" in text for text in texts), texts


def test_a_process_alone_uses_its_device_once_torch_xla_has() -> None:
    with fake_torch_xla():
        importlib.import_module("torch_xla")
        with rw.init() as session:
            assert (session.world_size, session.device.type) == (1, "cpu")
        importlib.import_module("torch_xla").device()
        with rw.init() as session:
            assert (session.world_size, session.device) == (1, torch.device("xla", 0))
            assert rw.all_reduce(3) == 3


def test_other_backends_are_refused_in_a_device_thread() -> None:
    def rank() -> str:
        with pytest.raises(InvalidArgumentError) as raised:
            rw.init(backend="gloo")
        return str(raised.value)

    with fake_torch_xla(2):
        assert all("torch_xla has started this rank" in text for text in run_ranks(rank))


def test_a_process_that_torch_xla_connects_to_others_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SPMD on several hosts, where each process would be rank 0 of 1."""

    def refused() -> None:
        for call in (rw.get_rank, rw.init, lambda: rw.all_reduce(1)):
            with pytest.raises(LauncherEnvironmentError, match=r"connects 3 processes, .* init_method='xla://'"):
                call()

    with fake_torch_xla():
        importlib.import_module("torch_xla").device()
        monkeypatch.setattr(importlib.import_module("torch_xla.runtime"), "process_count", lambda: 3)
        reset_current()
        refused()
        with rw.init(launcher="none", backend="gloo") as session:
            assert session.world_size == 1
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        reset_current()
        assert rw.get_world_size() == 1, "the variables have a launcher's ranks"
    reset_current()


@pytest.mark.slow
def test_a_session_beside_a_process_group_of_torch_xla(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": f"{FAKE}:{Path(FAKE).parents[2]}", "PATH": "", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.xla.programs.process_group"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.stdout == "done\n", ended.stderr


@pytest.mark.slow
def test_torch_xla_is_not_imported_before_it_is_used(tmp_path: Path) -> None:
    program = """
import sys
import rankwise as rw
with rw.init(backend="gloo"):
    rw.all_reduce(1)
    rw.get_rank()
assert not [name for name in sys.modules if name.startswith("torch_xla")]
with rw.init(backend="xla") as session:
    assert session.device.type == "xla"
    assert rw.all_gather("x") == ["x"]
assert sys.modules["torch_xla"].__version__.endswith("fake")
"""
    environ = {"PYTHONPATH": FAKE, "PATH": "", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
