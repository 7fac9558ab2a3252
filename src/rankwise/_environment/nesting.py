"""Launchers inside of `rankwise launch`: whose rank a process is that has the variables of both.

A rank's children inherit its variables. An inner torchrun, or `rankwise launch`, replaces all of them; an inner mpirun
or srun only adds its own. Which of these were set before the rank was started is therefore recorded in its environment.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, Launcher

# Of the ranks of `rankwise launch`: the run that they belong to, and the ranks of other launchers that it runs in.
RUN: Final = "RANKWISE_RUN_ID"
OUTER: Final = "RANKWISE_OUTER_RANK"

# What differs between an outer rank and an inner one of the same launcher.
IDENTITY: Final = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    "intelmpi": ("PMI_RANK", "I_MPI_HYDRA_UUID"),
    "mpich": ("PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD"),
    "slurm": ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
}
_NAMES: Final = tuple(dict.fromkeys(name for names in IDENTITY.values() for name in names))

# What the agent sets in every rank, as torchrun's does.
OF_AGENT: Final = frozenset({
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
})  # fmt: skip


def run_marks(environ: Environ) -> dict[str, str]:
    """Return the variables that identify a rank of `rankwise launch`, given the rest of its environment."""
    outer = " ".join(f"{name}={environ[name]}" for name in _NAMES if name in environ)
    return {RUN: _run(environ), OUTER: outer}


def is_of_run(environ: Environ) -> bool:
    """Return whether torch's variables are those of `rankwise launch`, and not of a torchrun that it has started."""
    return environ.get(RUN) == _run(environ)


def own_variables(environ: Environ, launchers: tuple[Launcher, ...]) -> Environ:
    """Return the variables without those of a `rankwise launch` whose rank has started this process's own launcher.

    Args:
        environ: The variables.
        launchers: Those that are recognized by variables of their own.
    """
    run_id, _, address = environ.get(RUN, "").rpartition("@")
    if OUTER not in environ or environ.get("TORCHELASTIC_RUN_ID") != run_id:
        return environ
    outer = dict(pair.split("=", 1) for pair in environ[OUTER].split() if "=" in pair)
    for launcher in launchers:
        names = IDENTITY.get(launcher.name, ())
        if launcher.present(environ) and any(environ.get(name, outer.get(name)) != outer.get(name) for name in names):
            host, _, port = address.rpartition(":")
            changed = {"MASTER_ADDR": host, "MASTER_PORT": port}.items() - environ.items()  # as by mpirun -x
            inherited = (OF_AGENT | {RUN, OUTER}) - {name for name, _ in changed}
            return {name: value for name, value in environ.items() if name not in inherited}
    return environ


def _run(environ: Environ) -> str:
    """Return what no other agent's variables have in common: an id alone is the user's, by default "none"."""
    run_id, host, port = (environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return f"{run_id}@{host}:{port}"
