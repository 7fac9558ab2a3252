"""No launcher: a world of one, unless the variables show that more ranks were intended."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import OVERRIDES, Environ, Fact, LaunchEnvironment, says_others
from rankwise.errors import LauncherEnvironmentError

# Variables that a launcher sets in addition to those that are read, and their values in a world of one.
_LEFT_OVER: Final = (
    ("torchrun", "LOCAL_WORLD_SIZE", "1"),
    ("torchrun", "GROUP_RANK", "0"),
    ("torchrun", "GROUP_WORLD_SIZE", "1"),
    ("torchrun", "TORCHELASTIC_RESTART_COUNT", ""),
    ("mpirun", "OMPI_COMM_WORLD_NODE_RANK", "0"),
    ("srun", "SLURM_STEP_NUM_TASKS", "1"),
    ("srun", "SLURM_LOCALID", "0"),
    ("srun", "SLURM_NODEID", "0"),
)
# How many characters of a list a message shows.
_SHOWN: Final = 200


class SingleProcess:
    """A process that no launcher has started as a rank.

    Reads: SLURM_NTASKS, SLURM_JOB_ID, PET_NNODES, PET_NPROC_PER_NODE, PBS_JOBID, PBS_NUM_NODES, SM_HOSTS and
    TPU_WORKER_HOSTNAMES, which show that more processes were intended; and LOCAL_WORLD_SIZE, GROUP_RANK,
    GROUP_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT, OMPI_COMM_WORLD_NODE_RANK, SLURM_STEP_NUM_TASKS, SLURM_LOCALID,
    SLURM_NODEID, which are left over if the variables of a rank are missing.
    """

    name: Final = "none"
    description: Final = "no launcher: a world of one"
    variables: Final = (
        *("SLURM_JOB_ID", "SLURM_NTASKS", "PET_NNODES", "PET_NPROC_PER_NODE", "PBS_JOBID", "PBS_NUM_NODES", "SM_HOSTS"),
        "TPU_WORKER_HOSTNAMES",
        *("PMIX_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        *(name for _, name, _ in _LEFT_OVER),
    )
    verified: Final = True

    def present(self, environ: Environ) -> bool:  # noqa: ARG002 - the last resort, whatever the variables
        return True

    def read(self, environ: Environ) -> LaunchEnvironment:
        zero, one = Fact(0, "no launcher"), Fact(1, "no launcher")
        return LaunchEnvironment(
            launcher=self.name,
            rank=zero,
            world_size=one,
            local_rank=zero,
            local_world_size=one,
            node_rank=zero,
            num_nodes=one,
            warnings=_warnings(environ),
        )


def refuse_incomplete(environ: Environ) -> None:
    """Refuse variables that have a meaning only together with others.

    Raises:
        LauncherEnvironmentError: WORLD_SIZE or LOCAL_RANK says that there are other ranks, and RANK is not set; or
            PMIX_RANK is, as by prterun, and nothing gives the number of ranks.
    """
    if "PMIX_RANK" in environ:
        raise LauncherEnvironmentError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, but no variable gives the number of ranks; "
            "start with mpirun instead of prterun, or set RANK and WORLD_SIZE for each process"
        )
    local_size = ("LOCAL_WORLD_SIZE",) if "LOCAL_RANK" in environ else ()  # else it is left over
    if name := says_others(environ, "WORLD_SIZE", "LOCAL_RANK", *local_size):
        raise LauncherEnvironmentError(
            f"RANK is not set, but {name}={environ[name]} is: set RANK for each process, or unset {name} to run alone"
        )


def refuse_incomplete_override(environ: Environ) -> None:
    """Refuse variables with the prefix RANKWISE_ that would be ignored, because RANKWISE_RANK is not set.

    Raises:
        LauncherEnvironmentError: Such a variable is set.
    """
    if OVERRIDES[0] in environ:
        return
    for name in OVERRIDES:
        if name in environ:
            raise LauncherEnvironmentError(
                f"{OVERRIDES[0]} is not set, but {name}={environ[name]} is: set {OVERRIDES[0]} and {OVERRIDES[1]} for "
                f"each process, or unset {name}"
            )


def _warnings(environ: Environ) -> tuple[str, ...]:
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and tasks != "1":
        return (
            f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, but this process runs alone: prefix it with srun",
        )
    num_hosts = environ.get("TPU_WORKER_HOSTNAMES", "").count(",") + 1
    if num_hosts > 1:
        remedy = (
            "rankwise.launch(fn, backend='xla') on each starts a rank for each TPU, launcher='tpu' is one rank a host"
        )
        return (f"TPU_WORKER_HOSTNAMES has {num_hosts} hosts, but this process runs alone: {remedy}",)
    nodes, processes = environ.get("PET_NNODES", "1"), environ.get("PET_NPROC_PER_NODE", "1")
    if (nodes, processes) != ("1", "1"):
        meant = f"{nodes} pods of {processes} processes (PET_NNODES, PET_NPROC_PER_NODE)"
        return (f"this Kubeflow job has {meant}, but this process runs alone: start it with torchrun",)
    nodes = environ.get("PBS_NUM_NODES", "1")
    if "PBS_JOBID" in environ and nodes != "1":
        return (
            f"PBS job {environ['PBS_JOBID']} has {nodes} nodes, but this process runs alone: start it with mpiexec",
        )
    if "," in environ.get("SM_HOSTS", ""):
        hosts = environ["SM_HOSTS"][:_SHOWN]
        return (f"SM_HOSTS={hosts} has several hosts, but this process runs alone: start it with a distribution",)
    return tuple(
        f"{name}={environ[name]} is set, as in ranks of {launcher}, but the other variables of a rank are not: "
        f"this process runs alone; unset {name} if it is left over"
        for launcher, name, alone in _LEFT_OVER
        if environ.get(name, alone) != alone
    )
