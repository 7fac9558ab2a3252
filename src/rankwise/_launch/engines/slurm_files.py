"""The files of jobs of Slurm: those of submitit, the outcomes of ranks, and the size of each job, in one folder."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise._launch.engines.interface import RankJob, RankOutcome
from rankwise.errors import LaunchError


def make_folder(folder: Path) -> None:
    """Make the folder, for this user alone: results are pickles, which run code when they are read.

    Raises:
        LaunchError: It cannot be made, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"the folder {folder} for jobs of Slurm cannot be made: {error.strerror}") from error
    _require_own(folder)


def _require_own(folder: Path) -> None:
    """Check that nobody else may write to the folder.

    Raises:
        LaunchError: It belongs to another user, or its mode lets others write.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LaunchError(
            f"the folder {folder} for jobs of Slurm belongs to user {status.st_uid} and has the mode "
            f"{stat.S_IMODE(status.st_mode):o}, so that others could put pickles there, which run code: name a folder "
            f"of your own, or `chmod go-w {folder}`"
        )


def write_size(folder: Path, job_id: str, job: RankJob, token: str) -> None:
    """Record the size of a job, and the token of its outcomes: Slurm may give the id to another job some day."""
    text = json.dumps({"nproc": job.nproc, "nnodes": job.nnodes, "name": job.name, "token": token})
    (folder / f"{job_id}_size.json").write_text(text)


def read_size(folder: Path, job_id: str) -> Mapping[str, Any]:
    """Return the size of a job, nproc and nnodes, and its token.

    Raises:
        LaunchError: The folder has no such job, or others may write to it.
    """
    try:
        _require_own(folder)
        size: Mapping[str, Any] = json.loads((folder / f"{job_id}_size.json").read_text())
    except (OSError, ValueError):
        raise LaunchError(
            f"{folder} has no files of job {job_id}: name the folder that it was submitted with (--folder, or "
            "SlurmEngine(folder=...))"
        ) from None
    return size


def write_outcome(folder: Path, token: str, attempt: int, outcome: RankOutcome) -> None:
    """Record how a rank has ended, for readers that see either all of it or nothing."""
    path = folder / f"{token}_{outcome.rank}_{attempt}_outcome.pkl"
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        pickle.dump(outcome, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_outcomes(folder: Path, token: str, *, attempt: int | None = None) -> dict[int, RankOutcome]:
    """Return the outcomes of the last attempt that has any, or of that attempt, by rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob(f"{token}_*_outcome.pkl"):
        match = re.fullmatch(rf"{token}_(\d+)_(\d+)_outcome\.pkl", path.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    last = (max(found) if found else 0) if attempt is None else attempt
    return {rank: pickle.loads(path.read_bytes()) for rank, path in found.get(last, {}).items()}


def number_of_outcomes(folder: Path, token: str) -> int:
    """Return how many outcomes the last attempt has, without reading them."""
    attempts = [path.name.split("_")[-2] for path in folder.glob(f"{token}_*_outcome.pkl")]
    return attempts.count(max(attempts, key=int)) if attempts else 0


def logs(folder: Path, job_id: str) -> dict[int, Sequence[Path]]:
    """Return the files with the output of the ranks that have started, by rank: standard output, standard error.

    Raises:
        LaunchError: The folder has no such job.
    """
    read_size(folder, job_id)
    found: dict[int, Sequence[Path]] = {}
    for path in folder.glob(f"{job_id}_*_log.out"):
        rank = re.fullmatch(rf"{job_id}_(\d+)_log\.out", path.name)
        if rank:
            found[int(rank[1])] = (path, path.with_suffix(".err"))
    return dict(sorted(found.items()))
