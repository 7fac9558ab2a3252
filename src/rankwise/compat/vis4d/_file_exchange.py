"""Values exchanged through files, for ranks with a shared file system. The caller's folders are never removed."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import rankwise
from rankwise import is_joined
from rankwise.compat.vis4d._pickle_semantics import with_pickle_semantics
from rankwise.errors import CollectiveError, CollectiveTimeoutError, InvalidArgumentError
from rankwise.extend.checks import ranks_text
from rankwise.extend.collectives import collective

# The longest time until a file of another host is visible here: NFS clients refresh attributes once a minute.
_VISIBLE_SECONDS: Final = 90.0
_PAUSE_SECONDS: Final = 0.05


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


def all_gather_object_cpu(
    data: Any,  # noqa: ANN401 - anything
    tmpdir: str | None = None,
    rank_zero_return_only: bool = True,
    use_system_tmp: bool = False,  # noqa: ARG001 - the original's
) -> list[Any] | None:
    """Return every rank's value, in the order of ranks: on rank zero, and None elsewhere; or on all ranks.

    Collective over the session. Without a `tmpdir` no file is written.

    Args:
        data: This rank's value.
        tmpdir: A folder on a file system that all ranks share. Values are exchanged through files in a new folder in
            it, which is removed; its other contents are not touched.
        rank_zero_return_only: Return the values on rank zero only; the same on all ranks.
        use_system_tmp: Ignored: no file is needed without a `tmpdir`.

    Raises:
        NotJoinedError: There are several ranks, and this process has not joined them.
        InvalidArgumentError: Some ranks do not see `tmpdir`.
        RemoteRankError: Another rank could not pickle its value, or write or read a file.
        CollectiveError: A rank ended; or its file is not visible here, or was removed.

    Example:
        >>> all_gather_object_cpu("alone")
        ['alone']
    """
    if rankwise.get_world_size() == 1:
        return [data]
    if tmpdir is None:
        value = with_pickle_semantics(data)
        return rankwise.gather(value) if rank_zero_return_only else rankwise.all_gather(value)
    with _folder_in(tmpdir) as folder:
        return _gather_through_files(folder, data, rank_zero_return_only=rank_zero_return_only)


@contextmanager
def _folder_in(tmpdir: str) -> Iterator[Path]:
    """Make a folder in `tmpdir` on rank zero, and remove it afterwards."""
    with collective("all_gather_object_cpu", settings={"step": "folder"}):
        made = ""
        if rankwise.get_rank() == 0:
            Path(tmpdir).mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix="gather-", dir=Path(tmpdir).absolute())
    folder = Path(made) if made else None
    try:
        folder = Path(tmpdir).absolute() / Path(rankwise.broadcast(made)).name
        yield folder
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # rank zero may be the one that ended
        raise
    if rankwise.get_rank() == 0:
        shutil.rmtree(folder)


def _gather_through_files(folder: Path, data: Any, *, rank_zero_return_only: bool) -> list[Any] | None:  # noqa: ANN401
    """Write this rank's value, and read the values of all ranks, if this rank returns them."""
    with collective("all_gather_object_cpu", settings={"rank_zero_return_only": rank_zero_return_only}) as members:
        size = _write(folder / f"{members.rank}.pkl", data)
        sizes = [int(message) for message in members.all_gather_bytes(b"%d" % size)]
    if not all(sizes):
        _check_seen_by_all(
            str(folder), f"tmpdir={str(folder.parent)!r} has to be on a file system that all ranks share"
        )
    if rank_zero_return_only:
        values = _read(folder, sizes) if members.rank == 0 else None
    else:
        with collective("all_gather_object_cpu", settings={"step": "read"}) as members:
            values = _read(folder, sizes)
            members.verify()  # after this every rank has read the files, and rank zero may remove them
    if not all(sizes) or (values is not None and len(values) < len(sizes)):
        raise CollectiveError(
            f"{folder} was removed while ranks exchanged files in it; does another program remove files there?"
        )
    return values


def _write(path: Path, data: Any) -> int:  # noqa: ANN401 - anything
    """Write a value, and return its size; 0 if the folder is not there: a rank that failed removes it."""
    try:
        file = path.open("xb")
    except FileNotFoundError:
        return 0  # the exchange of sizes raises the error of the rank that failed
    with file:
        pickle.dump(data, file)
        return file.tell()


def _read(folder: Path, sizes: Sequence[int]) -> list[Any]:
    """Return the values in the files of all ranks; fewer if the folder is removed."""
    values: list[Any] = []
    for rank, size in enumerate(sizes):
        path = folder / f"{rank}.pkl"
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while _size(path) != size:
            if not folder.is_dir() or not size:
                return values
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"{path}, which rank {rank} has written, is not visible here within {_VISIBLE_SECONDS:g} s; "
                    "is its folder on a file system that all ranks share?"
                )
            time.sleep(_PAUSE_SECONDS)
        with path.open("rb") as file:
            values.append(pickle.load(file))
    return values


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


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
