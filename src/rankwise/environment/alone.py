"""No launcher: a world of one, unless the variables show that somebody meant more."""

from __future__ import annotations

from typing import Final

from rankwise.environment.reading import Environ, Fact, Reading
from rankwise.errors import LauncherEnvironmentError


class Alone:
    """A process that nobody launched as a rank.

    Reads: SLURM_NTASKS, SLURM_JOB_ID and PET_NNODES, PET_NPROC_PER_NODE, which show that more processes were meant.
    """

    name: Final = "none"

    def present(self, environ: Environ) -> bool:  # noqa: ARG002 - the last resort, whatever the variables
        return True

    def read(self, environ: Environ) -> Reading:
        zero, one = Fact(0, "no launcher"), Fact(1, "no launcher")
        return Reading(
            launcher=self.name,
            rank=zero,
            world_size=one,
            local_rank=zero,
            local_world_size=one,
            node_rank=zero,
            num_nodes=one,
            warnings=_warnings(environ),
        )


def refuse_half(environ: Environ) -> None:
    """Refuse variables that only mean something together with others.

    Raises:
        LauncherEnvironmentError: WORLD_SIZE or LOCAL_RANK is set, with or without the prefix RANKWISE_, RANK is not; or
            PMIX_RANK is, as by prterun, and nothing says how many ranks there are.
    """
    if "PMIX_RANK" in environ:
        raise LauncherEnvironmentError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, but no variable says how many ranks there are; "
            "start with mpirun instead of prterun, or set RANK and WORLD_SIZE for each process"
        )
    for prefix in ("RANKWISE_", ""):
        for name in (f"{prefix}WORLD_SIZE", f"{prefix}LOCAL_RANK"):
            if name in environ:
                raise LauncherEnvironmentError(
                    f"{prefix}RANK is not set, but {name}={environ[name]} is: "
                    f"set {prefix}RANK for each process, or unset {name} to run alone"
                )


def _warnings(environ: Environ) -> tuple[str, ...]:
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and tasks != "1":
        return (
            f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, but this process runs alone: prefix it with srun",
        )
    nodes, processes = environ.get("PET_NNODES", "1"), environ.get("PET_NPROC_PER_NODE", "1")
    if (nodes, processes) != ("1", "1"):
        meant = f"{nodes} pods of {processes} processes (PET_NNODES, PET_NPROC_PER_NODE)"
        return (f"this Kubeflow job has {meant}, but this process runs alone: start it with torchrun",)
    return ()
