"""Every variable that determines the rank of a process, counts its restarts, or is checked for completeness.

Code that hides a launcher from a process removes these. `tests/environment/test_variables.py` compares the list with
the names in the source.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.detect import LAUNCHERS
from rankwise._environment.facts import OVERRIDES, RESTART_COUNTS, Environ
from rankwise._environment.nesting import AGENT_VARIABLES, OUTER, RANK_VARIABLES, RUN
from rankwise._environment.unsupported import UNSUPPORTED

VARIABLES: Final = frozenset(
    {
        *OVERRIDES,
        *(name for launcher in LAUNCHERS for name in launcher.variables),
        *(RUN, OUTER, *AGENT_VARIABLES, *RESTART_COUNTS),
        *(name for names in RANK_VARIABLES.values() for name in names),
        *(name for launcher in UNSUPPORTED for name in (launcher.rank, launcher.world_size)),
    }
)
# What launchers set besides: for their own commands and for MPI libraries, which would join the outer launch.
_PREFIXES: Final = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "OMPI_COMM_")
# Settings of a person or a cluster, which a job has from outside.
_SETTINGS: Final = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"})


def outer_launch_variables(environ: Environ) -> list[str]:
    """Return the variables by which the launch of this process describes its ranks, and its job of Slurm.

    A job that this process submits must not have them: it would be taken for a part of the outer one.
    """
    is_rank = "RANK" in environ  # else the address is a setting for the job
    in_job = "SLURM_JOB_ID" in environ  # else variables of Slurm are settings
    names = VARIABLES - AGENT_VARIABLES | (AGENT_VARIABLES | {"RANKWISE_SECRET"} if is_rank else set())
    found = []
    for name in environ:
        is_set_for_ranks = name.startswith(_PREFIXES) and (in_job or not name.startswith("SLURM_"))
        if (name in names or is_set_for_ranks) and name not in _SETTINGS:
            found.append(name)
    return found
