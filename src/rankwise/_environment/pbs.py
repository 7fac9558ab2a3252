"""PBS without MPI: the tasks of pbsdsh."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, HostFile, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="pbsdsh sets the index of the task, and the batch script has to export WORLD_SIZE",
    rank="PBS_VNODENUM",
    world_size="WORLD_SIZE",
    job="PBS_JOBID",
)
_BATCH_SCRIPT: Final = "1"


class Pbs:
    """A task of pbsdsh.

    Reads: PBS_VNODENUM, PBS_TASKNUM, PBS_JOBID and PBS_NODEFILE, set by PBS; WORLD_SIZE, exported by the batch script;
    MASTER_ADDR and MASTER_PORT. PBS itself starts the batch script alone, which is task 1 and no rank, and most jobs
    use mpiexec, whose variables take precedence. So these count only with WORLD_SIZE, or if the program names this
    launcher. The first line of PBS_NODEFILE is the host of rank zero.
    """

    name: Final = "pbs"
    description: Final = "pbsdsh in a PBS job that exports WORLD_SIZE"
    variables: Final = (*_VARIABLES.names, "PBS_TASKNUM", "PBS_NODEFILE")
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        tasks = environ.get("PBS_TASKNUM", _BATCH_SCRIPT)
        return "PBS_VNODENUM" in environ and "WORLD_SIZE" in environ and tasks != _BATCH_SCRIPT

    def read(self, environ: Environ) -> LaunchEnvironment:
        reading = _VARIABLES.read(environ, self.name)
        path = environ.get("PBS_NODEFILE")
        return reading.with_host_file(HostFile(path, "PBS_NODEFILE") if path else None)
