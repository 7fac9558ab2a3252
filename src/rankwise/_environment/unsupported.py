"""Variables of launchers without a reader, and incomplete ones of others: an error, never a world of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankwise._environment.facts import Environ, Fact, read_int
from rankwise.errors import LauncherEnvironmentError


@dataclass(frozen=True, slots=True)
class UnsupportedLauncher:
    """A launcher that is not supported, and its variables for the rank and for the number of ranks."""

    name: str
    rank: str
    world_size: str


UNSUPPORTED: Final = (
    UnsupportedLauncher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    UnsupportedLauncher("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    UnsupportedLauncher("MVAPICH 2", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    UnsupportedLauncher("MVAPICH 3", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE"),
    UnsupportedLauncher("LSF's jsrun", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    UnsupportedLauncher("PALS", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    UnsupportedLauncher("Flux", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    UnsupportedLauncher("MPICH", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    UnsupportedLauncher("PMI", "PMI_RANK", "PMI_SIZE"),
    UnsupportedLauncher("MPICH with -pmi-port", "PMI_ID", "PMI_SIZE"),  # last: other launchers set the size too
)


def refuse_unsupported(environ: Environ, *, any_value: bool) -> None:
    """Refuse variables that no reader takes and that show a world of more than one rank.

    Args:
        environ: The variables.
        any_value: Refuse those of a world of one too: they may be of a host that has one of several ranks.

    Raises:
        LauncherEnvironmentError: They do, or are unreadable, or lack the number of ranks.
    """
    for launcher in UNSUPPORTED:
        rank, world_size = read_int(environ, launcher.rank), read_int(environ, launcher.world_size)
        if rank is None and world_size is None:
            continue
        if any_value or world_size is None or world_size.value != 1 or (rank is not None and rank.value != 0):
            raise _unsupported_error(launcher, rank, world_size)


def refuse_task_without_step(environ: Environ) -> None:
    """Refuse a Slurm task number other than zero without a step: only a batch script, task zero, has no step.

    Raises:
        LauncherEnvironmentError: There is one, or it is unreadable.
    """
    task = read_int(environ, "SLURM_PROCID")
    if task is not None and task.value != 0:
        raise LauncherEnvironmentError(
            f"SLURM_PROCID={task.value} is set, but SLURM_STEP_ID={environ.get('SLURM_STEP_ID', '')!r} names no "
            "step that it could be a task of; start with srun, which sets both, or unset SLURM_PROCID to run alone"
        )


def _unsupported_error(
    launcher: UnsupportedLauncher, rank: Fact[int] | None, world_size: Fact[int] | None
) -> LauncherEnvironmentError:
    found = " and ".join(f"{fact.source}={fact.value}" for fact in (rank, world_size) if fact is not None)
    missing = "" if world_size is not None else f", without {launcher.world_size}"
    return LauncherEnvironmentError(
        f"{found}{missing} ({launcher.name}): this process may be one of several ranks, but these variables alone are "
        "not read; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or RANKWISE_RANK=0 and "
        "RANKWISE_WORLD_SIZE=1 to run alone"
    )
