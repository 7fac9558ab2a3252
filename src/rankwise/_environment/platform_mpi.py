"""Platform MPI, formerly HP-MPI."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="mpirun of Platform MPI sets both",
    rank="MPI_RANKID",
    world_size="MPI_NRANKS",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)


class PlatformMpi:
    """A rank of Platform MPI.

    Reads: MPI_RANKID, MPI_NRANKS, and MPI_LOCALRANKID, MPI_LOCALNRANKS where it sets them.
    """

    name: Final = "platformmpi"
    description: Final = "mpirun of Platform MPI"
    variables: Final = _VARIABLES.names
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return _VARIABLES.present(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
