"""Every variable that determines the rank of a process, or is checked to refuse an incomplete environment.

Code that hides a launcher from a process removes these. `tests/environment/test_variables.py` compares the list with
the names in the source.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.nesting import AGENT_VARIABLES, OUTER, RANK_VARIABLES, RUN
from rankwise._environment.unsupported import UNSUPPORTED

# Those of torch, and of launchers and scripts that use its names.
_OF_TORCH: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "CROSS_RANK", "GROUP_WORLD_SIZE", "NUM_NODES", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

VARIABLES: Final = frozenset(
    {
        *_OF_TORCH,
        *(f"RANKWISE_{name}" for name in _OF_TORCH),
        *(RUN, OUTER, *AGENT_VARIABLES),
        *(name for names in RANK_VARIABLES.values() for name in names),
        *("PET_NNODES", "PET_NPROC_PER_NODE"),
        *(name for launcher in UNSUPPORTED for name in (launcher.rank, launcher.world_size)),
        *("PMIX_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
        *("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
        *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
        *("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    }
)
