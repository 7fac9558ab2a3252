"""Flux."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="flux run sets both; in the script of flux batch or flux alloc, unset the FLUX_TASK_ variables to run alone",
    rank="FLUX_TASK_RANK",
    world_size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    num_nodes="FLUX_JOB_NNODES",
    job="FLUX_JOB_ID",
)
# The world sizes of MPI launchers, each with that of the launcher which may have set it around Flux.
_OF_MPI: Final = (
    ("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"),
    *((name, "") for name in ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "MPI_NRANKS")),
)


class Flux:
    """A task of Flux.

    Reads: FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES and FLUX_JOB_ID, set by Flux's shell.
    No variable has a host: ranks on several nodes need MASTER_ADDR, which `flux hostlist --nth=0 local` prints in a
    task. The number of tasks on this node is known where there is one node.

    srun, jsrun or mpiexec may have started Flux, and its tasks have their variables too, in most versions. A task may
    also be an mpirun: OMPI_COMM_WORLD_SIZE shows Open MPI, but the one of jsrun, and MPI_LOCALRANKID shows Hydra if
    PMI_RANK and PMI_SIZE are not those that Flux sets.
    """

    name: Final = "flux"
    description: Final = "flux run, flux submit, flux batch"
    variables: Final = (
        *_VARIABLES.names,
        *(name for names in _OF_MPI for name in names if name),
        *("MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE"),
    )
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        if not _VARIABLES.present(environ):
            return False
        if any(inner in environ and environ[inner] != environ.get(outer) for inner, outer in _OF_MPI):
            return False
        own = (("PMI_RANK", _VARIABLES.rank), ("PMI_SIZE", _VARIABLES.world_size))
        return "MPI_LOCALRANKID" not in environ or all(environ.get(pmi) == environ.get(flux) for pmi, flux in own)

    def read(self, environ: Environ) -> LaunchEnvironment:
        return _VARIABLES.read(environ, self.name)
