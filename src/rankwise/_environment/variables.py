"""Every variable that is read to find out which rank a process is: by a launcher's class, or to refuse what is left.

For those who hide a launcher from a process. `tests/environment/test_variables.py` compares it with what is read.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.nesting import IDENTITY, OF_AGENT, OUTER, RUN
from rankwise._environment.unsupported import UNSUPPORTED

# Of torch, and of those that set them by hand.
_OF_TORCH: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "CROSS_RANK", "GROUP_WORLD_SIZE", "NUM_NODES", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

VARIABLES: Final = frozenset(
    {
        *_OF_TORCH,
        *(f"RANKWISE_{name}" for name in _OF_TORCH),
        *(RUN, OUTER, *OF_AGENT),
        *(name for names in IDENTITY.values() for name in names),
        *("PET_NNODES", "PET_NPROC_PER_NODE"),
        *(name for unread in UNSUPPORTED for name in (unread.rank, unread.world_size)),
        *("PMIX_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
        *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
        *("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    }
)
