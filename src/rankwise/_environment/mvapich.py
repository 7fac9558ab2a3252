"""MVAPICH 2 and 3."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_START: Final = "mpirun_rsh and mpiexec set both"
MVAPICH2: Final = RankVariables(
    start=_START,
    rank="MV2_COMM_WORLD_RANK",
    world_size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
)
MVAPICH3: Final = RankVariables(
    start=_START,
    rank="MVP_COMM_WORLD_RANK",
    world_size="MVP_COMM_WORLD_SIZE",
    local_rank="MVP_COMM_WORLD_LOCAL_RANK",
    local_world_size="MVP_COMM_WORLD_LOCAL_SIZE",
)


class Mvapich:
    """MVAPICH 2 or 3, of which each has its own prefix.

    Reads: MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, or those with MVP_COMM_WORLD_, set by mpirun_rsh.
    Its mpiexec is Hydra, whose variables take precedence.
    """

    verified: Final = False

    def __init__(self, *, name: str, description: str, names: RankVariables) -> None:
        self.name = name
        self.description = description
        self.variables = names.names
        self._names = names

    def present(self, environ: Environ) -> bool:
        return self._names.present(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return self._names.read(environ, self.name)
