"""The recorded environments, varied as other versions of their launchers may set them: the result is the same.

Slurm 24.11 and Open MPI 5 were seen to set what is added here. The others leave out what rankwise does not need,
so that no reader comes to rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

from rankwise._environment.detect import detect
from tests.environment.test_recorded import RECORDED, Recorded
from tests.tables import each_row

Environ = dict[str, str]


def without(environ: Mapping[str, str], *names: str) -> Environ:
    return {name: value for name, value in environ.items() if name not in names}


def older_slurm(environ: Environ) -> Environ:
    """Without variables of tasks' resources and times, and without those of the job where the step's are there."""
    gone = [
        name for name in environ if name.startswith(("SLURM_TRES", "SLURM_STEPMGR", "SLURM_JOB_START", "SLURM_JOB_END"))
    ]
    return without(environ, *gone, "SLURM_JOB_NUM_NODES", "SLURM_PRIO_PROCESS", "SLURM_UMASK", "SLURM_CLUSTER_NAME")


def newer_slurm(environ: Environ) -> Environ:
    """24.11 sets variables of MPI launchers in every process, and has no aliases of nodes any more."""
    if not any(name.startswith("SLURM_JOB") for name in environ):
        return environ
    added = {
        "OMPI_MCA_plm_slurm_args": "--external-launcher",
        "PRTE_MCA_plm_slurm_args": "--external-launcher",
        "HYDRA_BOOTSTRAP": "slurm",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "--external-launcher",
        "I_MPI_HYDRA_BOOTSTRAP": "slurm",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "--external-launcher",
        "SLURM_JOB_START_TIME": "1764000000",
        "SLURM_JOB_END_TIME": "1764000600",
        "SLURM_OOM_KILL_STEP": "0",
        "SLURM_TRES_PER_TASK": "cpu=1",
    }
    return without(environ, "SLURM_WORKING_CLUSTER", "SLURM_NODE_ALIASES", "SLURM_NTASKS_HET_GROUP_1") | added


def slurm_with_pmi(environ: Environ) -> Environ:
    """`srun --mpi=pmi2` and `--mpi=pmix` add variables that agree with the step's, and none of a local rank."""
    if "SLURM_STEP_NUM_TASKS" not in environ or "PMI_RANK" in environ or environ.get("SLURM_STEP_ID") == "4294967290":
        return environ
    if any(name in environ for name in ("RANK", "OMPI_COMM_WORLD_RANK")):
        return environ
    rank, size = environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]
    return environ | {
        "PMI_RANK": rank,
        "PMI_SIZE": size,
        "PMI_JOBID": "7.0",
        "PMIX_RANK": rank,
        "SLURM_MPI_TYPE": "pmix",
    }


def newer_openmpi(environ: Environ) -> Environ:
    """5 has neither the address of mpirun nor the variables of ORTE."""
    return {name: value for name, value in environ.items() if not name.startswith(("OMPI_MCA_", "ORTE_", "OPAL_"))}


def older_openmpi(environ: Environ) -> Environ:
    """Without a name of the job, and without variables of PRRTE."""
    return {name: value for name, value in environ.items() if not name.startswith(("PRTE_", "PMIX_"))}


def older_hydra(environ: Environ) -> Environ:
    """With the rank, the size and the two numbers of the host, and little else."""
    return without(environ, "PMI_HOSTNAME", "HYDI_CONTROL_FD", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "PMI_PORT")


def older_intel(environ: Environ) -> Environ:
    """Without the variables of the launcher's daemons."""
    return {name: value for name, value in environ.items() if not name.startswith("HYDRA_BSTRAP_")}


def older_torchrun(environ: Environ) -> Environ:
    """Without roles and signals."""
    return without(
        environ,
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    )


def newer_torchrun(environ: Environ) -> Environ:
    """With variables that are not known here."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return environ
    return environ | {"TORCHELASTIC_HEALTH_CHECK_PORT": "1234", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}


def in_a_pod(environ: Environ) -> Environ:
    """The same in a container of Kubernetes or of a cloud, whose variables a process alone has too."""
    return environ | {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "KUBERNETES_PORT": "tcp://10.0.0.1:443",
        "HOSTNAME": "pod-0",
        "SM_CURRENT_HOST": "algo-1",
        "SM_HOSTS": '["algo-1"]',
        "AZUREML_RUN_ID": "r",
        "NVIDIA_VISIBLE_DEVICES": "all",
    }


VARIATIONS: tuple[Callable[[Environ], Environ], ...] = (
    older_slurm,
    newer_slurm,
    slurm_with_pmi,
    newer_openmpi,
    older_openmpi,
    older_hydra,
    older_intel,
    older_torchrun,
    newer_torchrun,
    in_a_pod,
)
SCENARIOS = {name: list(cases) for name, cases in groupby(RECORDED, key=lambda case: case.scenario)}


@each_row("scenario", SCENARIOS)
def test_a_scenario_of_other_versions(scenario: str) -> None:
    for variation in VARIATIONS:
        for case in SCENARIOS[scenario]:
            check(case, variation)


def check(case: Recorded, variation: Callable[[Environ], Environ]) -> None:
    recorded, varied = detect(case.environ), detect(variation(dict(case.environ)))
    assert varied.launcher == case.launcher
    assert (varied.rank.value, varied.world_size.value) == (case.rank, case.world_size)
    known = {name: fact.value for name, fact in varied.known_topology().items()}
    assert known == {name: fact.value for name, fact in recorded.known_topology().items()}
    assert (varied.host and varied.host.value) == (recorded.host and recorded.host.value)
