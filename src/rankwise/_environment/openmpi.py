"""Open MPI's mpirun."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

VARIABLES: Final = RankVariables(
    start="start with mpirun, which sets both",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
)


class OpenMpi:
    """Open MPI 4 and 5 (PRRTE).

    Reads: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, set by its daemons; PMIX_NAMESPACE, which names
    the job; and MASTER_ADDR, MASTER_PORT if the user passed them (-x). Never "any OMPI_ variable": Slurm 24.11 sets
    OMPI_MCA_* in every process. OMPI_COMM_WORLD_NODE_RANK is not the node's index, and no variable is.
    """

    name: str = "openmpi"
    description: str = "mpirun of Open MPI 4 and 5"
    variables: tuple[str, ...] = VARIABLES.names
    verified: bool = True

    def present(self, environ: Environ) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        return VARIABLES.read(environ, self.name)
