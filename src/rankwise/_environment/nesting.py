"""Launchers inside of `rankwise launch`: which of the two started a process that has the variables of both.

The children of a rank inherit its variables. An inner torchrun, or `rankwise launch`, replaces all of them; an inner
mpirun or srun only adds its own. So `rankwise launch` records in a rank's environment which of those were set before.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ
from rankwise._environment.own_launcher import Launcher

# Set in the ranks of `rankwise launch`: the id of the run, and the variables of the outer rank that it was started in.
RUN: Final = "RANKWISE_RUN_ID"
OUTER: Final = "RANKWISE_OUTER_RANK"

# The variables that differ between an outer rank and an inner one of the same launcher.
RANK_VARIABLES: Final = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    "intelmpi": ("PMI_RANK", "I_MPI_HYDRA_UUID"),
    "mpich": ("PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD"),
    "slurm": ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    "azureml": ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    "mvapich2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "mvapich3": ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    "platformmpi": ("MPI_RANKID", "MPI_NRANKS"),
    "lsf": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "pals": ("PALS_RANKID", "PALS_APID"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_ID"),
    "mpt": ("MPT_LRANK", "PMI_RANK"),
    "alps": ("ALPS_APP_PE",),
    "pmi": ("PMI_RANK", "PMI_SIZE", "PMI_FD"),
}
_NAMES: Final = tuple(dict.fromkeys(name for names in RANK_VARIABLES.values() for name in names))

# The variables that the agent sets in every rank, as torchrun's does.
AGENT_VARIABLES: Final = frozenset({
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
})  # fmt: skip


def run_variables(environ: Environ) -> dict[str, str]:
    """Return the variables that identify a rank of `rankwise launch`, given the rest of its environment."""
    outer = " ".join(f"{name}={environ[name]}" for name in _NAMES if name in environ)
    return {RUN: _run(environ), OUTER: outer}


def is_rankwise_launch(environ: Environ) -> bool:
    """Return whether torch's variables come from `rankwise launch`, and not from a torchrun that a rank has started."""
    return environ.get(RUN) == _run(environ)


def without_outer_ranks(environ: Environ, launchers: tuple[Launcher, ...]) -> Environ:
    """Return the variables without those of an outer `rankwise launch`, whose rank has started this process's launcher.

    Args:
        environ: The variables.
        launchers: All launchers; those with variables of their own in `RANK_VARIABLES` can be inner ones.
    """
    run_id, _, address = environ.get(RUN, "").rpartition("@")
    if OUTER not in environ or environ.get("TORCHELASTIC_RUN_ID") != run_id:
        return environ
    outer = dict(pair.split("=", 1) for pair in environ[OUTER].split() if "=" in pair)
    for launcher in launchers:
        names = RANK_VARIABLES.get(launcher.name, ())
        if launcher.present(environ) and any(environ.get(name, outer.get(name)) != outer.get(name) for name in names):
            host, _, port = address.rpartition(":")
            changed = {"MASTER_ADDR": host, "MASTER_PORT": port}.items() - environ.items()  # as by mpirun -x
            inherited = (AGENT_VARIABLES | {RUN, OUTER}) - {name for name, _ in changed}
            return {name: value for name, value in environ.items() if name not in inherited}
    return environ


def _run(environ: Environ) -> str:
    """Return a unique id of the run: TORCHELASTIC_RUN_ID alone is chosen by the user, and "none" by default."""
    run_id, host, port = (environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return f"{run_id}@{host}:{port}"
