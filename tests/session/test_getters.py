"""Getters: before, in and after a session, and that they never talk."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._environment.detect import detect
from rankwise._session.current import rank_of_this_thread, reset_current, set_current
from rankwise._session.session import SessionState

GETTERS = [
    rw.get_rank,
    rw.get_world_size,
    rw.get_local_rank,
    rw.get_local_world_size,
    rw.get_node_rank,
    rw.get_num_nodes,
]


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: int | str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    reset_current()


def test_alone() -> None:
    assert [getter() for getter in GETTERS] == [0, 1, 0, 1, 0, 1]
    assert rw.is_rank_zero()
    assert rw.backend() is None
    assert rw.topology() == rw.Topology(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1
    )


def test_right_before_init_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2."""
    set_variables(monkeypatch, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=1, GROUP_WORLD_SIZE=2)
    assert [getter() for getter in GETTERS] == [3, 4, 1, 2, 1, 2]
    assert not rw.is_rank_zero()


def test_what_no_variable_says_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2."""
    set_variables(
        monkeypatch,
        OMPI_COMM_WORLD_RANK=3,
        OMPI_COMM_WORLD_SIZE=4,
        OMPI_COMM_WORLD_LOCAL_RANK=1,
        OMPI_COMM_WORLD_LOCAL_SIZE=2,
    )
    assert [getter() for getter in GETTERS[:4]] == [3, 4, 1, 2]
    for getter in (rw.get_node_rank, rw.get_num_nodes, rw.topology):
        with pytest.raises(rw.NotJoinedError, match=r"launcher 'openmpi'; call rankwise\.init"):
            getter()


def test_collectives_of_a_world_that_nobody_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: four processes that each think they are alone would train four models."""
    set_variables(monkeypatch, RANK=3, WORLD_SIZE=4)
    for talk in (
        lambda: rw.all_reduce(1),
        lambda: rw.all_reduce(torch.ones(1)),
        lambda: rw.all_gather(1),
        lambda: rw.gather(1),
        lambda: rw.broadcast(1),
        lambda: rw.scatter([1]),
        lambda: rw.reduce(1),
        lambda: rw.all_to_all([1]),
        lambda: rw.reduce_scatter([torch.ones(1)]),
        rw.barrier,
        lambda: rw.new_group([0]),
        rw.node_group,
        rw.one_per_node_group,
        rw.store,
        lambda: rw.sync_grads([]),
        lambda: rw.sync_params(torch.nn.Identity()),
        lambda: rw.rank_zero_first().__enter__(),
    ):
        with pytest.raises(rw.NotJoinedError, match=r"rank 3 \(from RANK\) of 4 \(from WORLD_SIZE\)"):
            talk()


def test_variables_that_a_program_sets_late_do_not_leave_it_talking_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4, for programs that log their rank first and set RANK then, as functions under mp.spawn do."""
    assert rw.get_rank() == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rw.NotJoinedError):
        rw.all_reduce(1)


def test_half_an_environment_is_an_error_in_getters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 5."""
    set_variables(monkeypatch, RANK=3)
    for getter in GETTERS:
        with pytest.raises(rw.LauncherEnvironmentError, match="WORLD_SIZE is not set, but RANK=3 is"):
            getter()


def test_the_reading_is_dropped_on_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rw.get_rank() == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rw.get_rank() == 0
    rw.finalize()
    assert rw.get_rank() == 1


def test_the_reading_is_dropped_on_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rw.get_rank() == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    child = os.fork()
    if child == 0:
        os._exit(rw.get_rank())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert rw.get_rank() == 0


def test_with_a_session_a_getter_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2: not even the environment, and certainly no other rank; this session has no comm to talk with."""
    set_current(SessionState(detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})))
    monkeypatch.setattr("rankwise._session.environ.detect", None)
    assert [rw.get_rank(), rw.get_world_size(), rw.get_local_rank(), rw.get_local_world_size()] == [5, 8, 1, 2]
    reset_current()


def test_a_thread_that_is_a_rank_has_its_own_session() -> None:
    seen: dict[int, int] = {}

    def rank(number: int) -> None:
        with rank_of_this_thread(SessionState(detect({"RANK": str(number), "WORLD_SIZE": "3"}))):
            meet.wait(timeout=100)
            seen[number] = rw.get_rank()
            meet.wait(timeout=100)
        seen[number + 10] = rw.get_world_size()

    meet = threading.Barrier(3)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: 0, 1: 1, 2: 2, 10: 1, 11: 1, 12: 1}
    assert rw.get_rank() == 0


def test_explain_names_what_decided_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, RANK=3, WORLD_SIZE=4, MASTER_ADDR="h")
    lines = {line.split()[0]: line.split()[1:] for line in rw.explain().splitlines()}
    assert lines["launcher"] == ["plain"]
    assert lines["rank"] == ["3", "RANK"]
    assert lines["host"] == ["h", "MASTER_ADDR"]
    assert lines["local_rank"] == ["-", "not", "known", "before", "init()"]


def test_importing_and_asking_does_not_import_torch() -> None:
    program = "import rankwise as r, sys; r.get_rank(); r.topology(); r.explain(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_public_names_are_what_they_say() -> None:
    for name in rw.__all__:
        assert getattr(rw, name).__name__ == name
    assert set(dir(rw)) == {*rw.__all__, "__version__", "data"}
    assert set(rw.__all__) == set(rw._HOME), "written out for type checkers, and looked up here"
    assert rw.__version__ == importlib.metadata.version("rankwise")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rw.nothing  # noqa: B018 - that is the point


def test_the_version_of_a_copy_is_not_known(tmp_path: Path) -> None:
    """What is imported from a folder of its own was not installed, and must not take another's version."""
    shutil.copytree(Path(rw.__file__).parent, tmp_path / "rankwise", ignore=shutil.ignore_patterns("__pycache__"))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rankwise; rankwise.__version__"
    ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert f"AttributeError: rankwise.__version__ is not known: the package was copied to {tmp_path}" in ended.stderr


def test_a_submodule_does_not_take_over_a_functions_name() -> None:
    program = (
        "import rankwise, rankwise._launch.spec, rankwise.topology, sys;"
        "sys.exit(not (callable(rankwise.launch) and callable(rankwise.topology)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
