"""HPE MPT, formerly SGI MPT."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="mpiexec_mpt sets MPT_LRANK, and these only through PMI; set RANK and WORLD_SIZE for each process",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPT_LRANK",
)


class Mpt:
    """A rank of HPE MPT.

    Reads: MPT_LRANK, the rank on this node; and PMI_RANK, PMI_SIZE, which it needs too. Under srun, Slurm's variables
    take precedence.
    """

    name: Final = "mpt"
    description: Final = "mpiexec_mpt of HPE MPT"
    variables: Final = _VARIABLES.names
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "MPT_LRANK" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
