"""Folders that all ranks see."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import rankwise
from rankwise import is_joined
from rankwise.errors import InvalidArgumentError
from rankwise.extend._dropins import ranks_text
from rankwise.extend.collectives import collective


def create_tmpdir(rank: int, tmpdir: str | None = None, use_system_tmp: bool = True) -> str:
    """Return a folder that all ranks see: `tmpdir`, made if it does not exist; else a new one that rank zero makes.

    Collective over the session; Local with a `tmpdir`. The caller removes the folder.

    Args:
        rank: This process's rank.
        tmpdir: The caller's folder.
        use_system_tmp: Make the new folder among the system's temporary files; otherwise in the working directory.

    Raises:
        InvalidArgumentError: `rank` is not this process's; or some ranks, on other hosts, do not see the new folder.
        OSError: The folder cannot be made.
        RemoteRankError: Rank zero could not make it.
    """
    if tmpdir is not None:
        Path(tmpdir).mkdir(parents=True, exist_ok=True)
        return tmpdir
    if not is_joined():
        return _new_folder(rank, use_system_tmp=use_system_tmp)
    with collective("create_tmpdir"):
        made = _new_folder(rank, use_system_tmp=use_system_tmp)
    try:
        folder = rankwise.broadcast(made)
        _check_seen_by_all(folder, "pass use_system_tmp=False, or a tmpdir on a file system that all share")
    except BaseException:
        if made:
            shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def _new_folder(rank: int, *, use_system_tmp: bool) -> str:
    """Make a folder on rank zero, and return its path; "" on other ranks.

    Raises:
        InvalidArgumentError: `rank` is not this process's.
    """
    if rank != rankwise.get_rank():
        raise InvalidArgumentError(f"rank={rank!r}, but this process is rank {rankwise.get_rank()}")
    return "" if rank else tempfile.mkdtemp(prefix="vis4d-", dir=None if use_system_tmp else Path.cwd())


def _check_seen_by_all(folder: str, remedy: str) -> None:
    """Check that every rank sees a folder that rank zero has made, unless it was removed meanwhile.

    Raises:
        InvalidArgumentError: Some ranks do not see it.
    """
    without_folder = [rank for rank, sees in enumerate(rankwise.all_gather(Path(folder).is_dir())) if not sees]
    if without_folder and 0 not in without_folder:
        raise InvalidArgumentError(f"{ranks_text(without_folder)} cannot see {folder}, which rank 0 has made; {remedy}")
