"""Hydra, the mpirun and mpiexec of MPICH and Intel MPI."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="start with mpirun or mpiexec, which set both",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)


class Hydra:
    """Hydra, the launcher of MPICH and, with a variable of its own (`marker`), of Intel MPI.

    Reads: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS, set by its proxy on each host; I_MPI_HYDRA_UUID,
    set by Intel's alone; and MASTER_ADDR, MASTER_PORT if the user passed them (-genv). PMI_RANK without MPI_LOCALRANKID
    is `srun --mpi=pmi2`, whose step is the better source. No variable is shared by all ranks and by no other job's.
    """

    verified: Final = True

    def __init__(self, *, name: str, description: str, marker: str | None = None) -> None:
        self.name = name
        self.description = description
        self.marker = marker
        self.variables = _VARIABLES.names if marker is None else (*_VARIABLES.names, marker)

    def present(self, environ: Environ) -> bool:
        return all(name in environ for name in ("PMI_RANK", "MPI_LOCALRANKID", self.marker) if name is not None)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
