"""PALS, the mpiexec and aprun of HPE's Cray EX machines under PBS."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, HostFile, LaunchEnvironment
from rankwise._environment.rank_variables import RankVariables

_VARIABLES: Final = RankVariables(
    start="mpiexec of PALS sets PALS_RANKID, and PALS_NRANKS or PMI_SIZE",
    rank="PALS_RANKID",
    world_size="PALS_NRANKS",
    local_rank="PALS_LOCAL_RANKID",
    local_world_size="PALS_LOCAL_SIZE",
    node_rank="PALS_NODEID",
    job="PALS_APID",
    also=(("PALS_NRANKS", "PMI_SIZE"), ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")),
)


class Pals:
    """A rank of PALS.

    Reads: PALS_RANKID, PALS_NRANKS, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PALS_NODEID, and PMI_SIZE, PMI_LOCAL_RANK,
    PMI_LOCAL_SIZE for those that this version of PALS does not set; PALS_APID, the id of this application, of which a
    job may have several; and PBS_NODEFILE, set by PBS, whose first line is the host of rank zero.
    """

    name: Final = "pals"
    description: Final = "mpiexec of PALS (HPE Cray EX)"
    variables: Final = (*_VARIABLES.names, "PBS_NODEFILE")
    verified: Final = False

    def present(self, environ: Environ) -> bool:
        return _VARIABLES.present(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        reading = _VARIABLES.read(environ, self.name)
        path = environ.get("PBS_NODEFILE")
        return reading.with_host_file(HostFile(path, "PBS_NODEFILE") if path else None)
