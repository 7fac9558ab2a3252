"""Flux."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="flux run sets both",
    rank="FLUX_TASK_RANK",
    world_size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    num_nodes="FLUX_JOB_NNODES",
    job="FLUX_JOB_ID",
)


class Flux:
    """A task of Flux.

    Reads: FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES and FLUX_JOB_ID, set by Flux's shell.
    No variable has a host: ranks on several nodes need MASTER_ADDR, which `flux hostlist --nth=0 local` prints in a
    task. The number of tasks on this node is known where there is one node.
    """

    name: Final = "flux"
    description: Final = "flux run, flux submit, flux batch"
    variables: Final = _VARIABLES.names
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return _VARIABLES.present(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
