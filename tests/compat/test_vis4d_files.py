"""Gathering through files: a folder of the caller's is never deleted, and calls do not meet each other's files."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Comm
from rankwise.compat import vis4d
from tests.compat.adapted import PROGRAMS
from tests.session.worlds import free_port, plain, run_ranks

PROGRAM = str(PROGRAMS / "die_writing.py")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of the caller's, which all ranks share, with something in it."""
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "part_0.pkl").write_text("precious")
    return str(tmp_path / "mine")


def kept(folder: str) -> bool:
    """Whether the folder is as the fixture made it."""
    return [path.read_text() for path in Path(folder).iterdir()] == ["precious"]


@pytest.mark.ranks("serial", 2, 4)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("through_files", [False, True])
def test_objects_are_gathered(comm: Comm, folder: str, everywhere: bool, through_files: bool) -> None:
    for step in range(3):  # the original's files have the same names in every call
        value = {"rank": vis4d.get_rank(), "step": step, "boxes": torch.ones(vis4d.get_rank() * 1000)}
        gathered = vis4d.all_gather_object_cpu(
            value, folder if through_files else None, rank_zero_return_only=not everywhere, use_system_tmp=True
        )
        if comm.rank and not everywhere:
            assert gathered is None
            continue
        assert gathered is not None
        wanted = [(rank, step, rank * 1000) for rank in range(comm.size)]
        assert [(part["rank"], part["step"], len(part["boxes"])) for part in gathered] == wanted
    vis4d.synchronize()
    assert kept(folder), "the original deletes the whole folder"


@pytest.mark.ranks(2)
def test_a_folder_that_is_not_there_is_made(comm: Comm, folder: str) -> None:
    new = f"{folder}/new/deep"
    gathered = vis4d.all_gather_object_cpu(vis4d.get_rank(), new, rank_zero_return_only=False)
    assert gathered == [0, 1]
    vis4d.synchronize()
    assert list(Path(new).iterdir()) == []
    vis4d.synchronize()
    shutil.rmtree(f"{folder}/new", ignore_errors=True)


@pytest.mark.ranks(2, 4)
def test_a_value_that_cannot_be_written_is_an_error_on_all_ranks(comm: Comm, folder: str) -> None:
    rank = vis4d.get_rank()
    value = (lambda: None) if rank == 1 else "fine"
    with pytest.raises((AttributeError, TypeError, rw.RemoteRankError, Exception), match="pickle"):
        vis4d.all_gather_object_cpu(value, folder)
    vis4d.synchronize()
    assert kept(folder)


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(comm: Comm, folder: str) -> None:
    error = rw.RemoteRankError if vis4d.get_rank() else OSError
    with pytest.raises(error, match="Not a directory"):
        vis4d.all_gather_object_cpu("data", f"{folder}/part_0.pkl/below")
    with pytest.raises(rw.MismatchError):
        vis4d.all_gather_object_cpu("data", folder, rank_zero_return_only=bool(vis4d.get_rank()))
    vis4d.synchronize()
    assert kept(folder)


@pytest.mark.ranks(2)
def test_a_folder_that_not_all_ranks_see_is_an_error_on_all(
    comm: Comm, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that work elsewhere, as on two hosts that share nothing."""
    monkeypatch.chdir(folder if vis4d.get_rank() == 0 else "/")
    with pytest.raises(rw.InvalidArgumentError, match=r"rank 1 cannot see .*; tmpdir=.*results' has to be on a file"):
        vis4d.all_gather_object_cpu("data", "results" if vis4d.get_rank() == 0 else "/nowhere/results")
    vis4d.synchronize()
    Path(folder, "results").rmdir() if vis4d.get_rank() == 0 else None


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_is_named_and_leaves_no_files(dying: int, folder: str) -> None:
    """In the middle of writing; where it is rank zero, another one clears up."""
    port = free_port()
    ends = run_ranks(PROGRAM, [plain(rank, 2, port) for rank in range(2)], folder, str(dying))
    assert ends[dying].returncode == -signal.SIGKILL
    told = ends[1 - dying].stdout
    assert told.startswith("CollectiveError: all_gather_object_cpu")
    assert f"rank {dying} " in told
    assert kept(folder)


@pytest.mark.ranks("serial", 2, 4)
@pytest.mark.parametrize("in_system", [False, True])
def test_a_new_folder_is_seen_by_all(comm: Comm, folder: str, in_system: bool) -> None:
    """The original's folders have predictable names in /tmp, or relative ones."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        made = vis4d.create_tmpdir(vis4d.get_rank(), use_system_tmp=in_system)
        assert Path(made).is_absolute()
        assert (Path(made).parent == Path(folder)) != in_system
        assert Path(made).stat().st_mode & 0o077 == 0, "nobody else looks into it"
        (Path(made) / str(vis4d.get_rank())).touch()
        vis4d.synchronize()
        assert len(list(Path(made).iterdir())) == comm.size
        vis4d.synchronize()
    finally:
        os.chdir(before)
    if vis4d.get_rank() == 0:
        shutil.rmtree(made)


@pytest.mark.ranks("serial", 2)
def test_a_folder_of_the_callers_is_used_as_it_is(comm: Comm, folder: str) -> None:
    assert vis4d.create_tmpdir(vis4d.get_rank(), folder) == folder
    assert kept(folder)


@pytest.mark.ranks("serial", 2)
def test_a_rank_that_is_not_ones_own_is_refused_on_all_ranks(comm: Comm) -> None:
    with pytest.raises((rw.InvalidArgumentError, rw.RemoteRankError), match="but this process is rank"):
        vis4d.create_tmpdir(vis4d.get_rank() + 1)
