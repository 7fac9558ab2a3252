"""Gathering with a folder, which is not used, and folders that all ranks see."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._comm.group import Group
from rankwise.compat import vis4d


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
@pytest.mark.parametrize("with_folder", [False, True])
def test_objects_are_gathered(comm: Group, folder: str, everywhere: bool, with_folder: bool) -> None:
    for step in range(3):
        value = {"rank": vis4d.get_rank(), "step": step, "boxes": torch.ones(vis4d.get_rank() * 1000)}
        gathered = vis4d.all_gather_object_cpu(
            value, folder if with_folder else None, rank_zero_return_only=not everywhere, use_system_tmp=True
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
def test_the_folder_need_not_exist(comm: Group, folder: str) -> None:
    gathered = vis4d.all_gather_object_cpu(vis4d.get_rank(), f"{folder}/part_0.pkl/below", rank_zero_return_only=False)
    assert gathered == [0, 1]
    with pytest.raises(rw.MismatchError):
        vis4d.all_gather_object_cpu("data", folder, rank_zero_return_only=bool(vis4d.get_rank()))
    assert kept(folder)


@pytest.mark.ranks("serial", 2, 4)
@pytest.mark.parametrize("in_system", [False, True])
def test_a_new_folder_is_seen_by_all(comm: Group, folder: str, in_system: bool) -> None:
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
def test_a_folder_of_the_callers_is_used_as_it_is(comm: Group, folder: str) -> None:
    assert vis4d.create_tmpdir(vis4d.get_rank(), folder) == folder
    assert kept(folder)


@pytest.mark.ranks("serial", 2)
def test_a_rank_that_is_not_ones_own_is_refused_on_all_ranks(comm: Group) -> None:
    with pytest.raises((rw.InvalidArgumentError, rw.RemoteRankError), match="but this process is rank"):
        vis4d.create_tmpdir(vis4d.get_rank() + 1)
