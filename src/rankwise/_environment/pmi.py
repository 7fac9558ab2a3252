"""PMI alone: MPICH up to 3.2, and its mpiexec.gforker."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="start with mpiexec, which sets both; mpiexec -pmi-port does not",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
)


class Pmi:
    """A rank of a launcher that sets the variables of PMI, and none of its own.

    Reads: PMI_RANK and PMI_SIZE; and MASTER_ADDR, MASTER_PORT if the user passed them (-genv). Hydra sets no more up to
    MPICH 3.2, and mpiexec.gforker does not at all: the rank on this host is learned from the other ranks.
    """

    name: Final = "pmi"
    description: Final = "mpiexec of MPICH 3.2 and before, mpiexec.gforker"
    variables: Final = _VARIABLES.names
    verified: Final = True

    def present(self, environ: Environ) -> bool:
        return _VARIABLES.present(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
