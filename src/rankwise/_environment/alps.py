"""ALPS, the aprun of Cray's XE and XC machines."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="aprun sets the rank alone: pass the others as in aprun -n 4 -e WORLD_SIZE=4 -e MASTER_ADDR=HOST",
    rank="ALPS_APP_PE",
    world_size="WORLD_SIZE",
)


class Alps:
    """A rank of aprun.

    Reads: ALPS_APP_PE, the only one that aprun sets; and WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which the user has to
    pass (-e).
    """

    name: Final = "alps"
    description: Final = "aprun of ALPS (Cray XE and XC)"
    variables: Final = _VARIABLES.names
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return "ALPS_APP_PE" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
