"""LSF's jsrun, the launcher of Summit, Sierra and their relatives."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, HostFile, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="jsrun sets both",
    rank="JSM_NAMESPACE_RANK",
    world_size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
    job="LSB_JOBID",
)


class Jsrun:
    """A task of jsrun.

    Reads: JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, set by jsrun; LSB_JOBID and LSB_DJOB_RANKFILE, set by
    LSF for the job. The hosts stand in that file, the host of the batch script first, which has no rank. Spectrum MPI
    adds OMPI_COMM_WORLD_RANK and _SIZE: if they differ, they are of an mpirun that the task has started.
    """

    name: Final = "lsf"
    description: Final = "jsrun of LSF"
    variables: Final = (*_VARIABLES.names, "LSB_DJOB_RANKFILE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        both = (("OMPI_COMM_WORLD_RANK", _VARIABLES.rank), ("OMPI_COMM_WORLD_SIZE", _VARIABLES.world_size))
        return _VARIABLES.present(environ) and all(
            environ.get(inner, environ.get(own)) == environ.get(own) for inner, own in both
        )

    def read(self, environ: Environ) -> LaunchEnvironment:
        reading = _VARIABLES.read(environ, self.name)
        path = environ.get("LSB_DJOB_RANKFILE")
        return reading.with_host_file(HostFile(path, "LSB_DJOB_RANKFILE", skipped=1) if path else None)
