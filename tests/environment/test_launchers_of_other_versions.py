"""Environments of versions of launchers that were not recorded, written from the sources that set the variables.

Each entry names the launcher, the version, and the file or function in its source.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rankwise._environment.detect import detect
from rankwise.errors import LauncherEnvironmentError
from tests.tables import each_row

Environ = dict[str, str]
SIX = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


@dataclass(frozen=True)
class Scenario:
    """The variables of a process, and what is true of it.

    Attributes:
        name: The launcher and its version.
        environ: The variables.
        launcher: The name of the reader; "error" if the variables leave the rank open.
        known: The first of rank, world_size, local_rank, local_world_size, node_rank, num_nodes; None where unknown.
        host: Of rank zero.
        text: A part of the error, or of a warning.
    """

    name: str
    environ: Environ
    launcher: str
    known: tuple[int | None, ...] = ()
    host: str | None = None
    text: str = ""


# slurmstepd's env_array_for_step in src/common/env.c has set these since 2.6.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[0-3]",
    "SLURM_STEP_LAUNCHER_PORT": "40000",
    "SLURM_NTASKS": "7",
    "SLURM_NPROCS": "7",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_GTIDS": "4,5",
}
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SLURM = [
    Scenario("slurm 14.11: no SLURM_JOB_NODELIST", STEP, "slurm", (5, 7, 1, 2, 2, 4), "node0"),
    Scenario(
        "slurm 14.11 on Blue Gene: SLURM_STEP_GEO",
        STEP | {"SLURM_STEP_GEO": "1x1x1", "SLURM_STEP_START_LOC": "0x0x0", "SLURM_STEP_SUB_MP": "0"},
        "slurm",
        (5, 7, 1, 2, 2, 4),
        "node0",
    ),
    # env_array_for_step with preserve_env, as of `srun --preserve-env -n7` in a job of two tasks
    Scenario(
        "slurm, srun --preserve-env: the job's numbers stay",
        STEP | {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"},
        "slurm",
        (5, 7, 1, 2, 2, 4),
        "node0",
    ),
    # 17.11, launch->pack_node_list: the step's variables are of all components, and SLURM_NPROCS of this one
    Scenario(
        "slurm 17.11, srun --pack-group=0,1",
        STEP | {"SLURM_PACK_SIZE": "2", "SLURM_JOB_ID_PACK_GROUP_0": "7", "SLURM_NPROCS": "3", "SLURM_NODELIST": "a"},
        "slurm",
        (5, 7, 1, 2, 2, 4),
        "node0",
    ),
    # slurmstepd of 20.11 and later, src/slurmd/slurmstepd/mgr.c
    Scenario(
        "slurm 26.05, a task with an address in the topology",
        STEP | {"SLURM_TOPOLOGY_ADDR": "s0.node2", "SLURM_JOB_SLUID": "sABC", "SLURM_OOM_KILL_STEP": "0"},
        "slurm",
        (5, 7, 1, 2, 2, 4),
        "node0",
    ),
    # setup_env in src/common/env.c of 26.05 prints the step's id with "%d", for batch scripts too (0xfffffffb)
    Scenario(
        "slurm 26.05, the batch script: SLURM_STEP_ID=-5",
        BATCH | {"SLURM_STEP_ID": "-5", "SLURM_STEPID": "-5"},
        "none",
        (0, 1, 0, 1, 0, 1),
        text="prefix it with srun",
    ),
    Scenario(
        "slurm 26.05, an interactive step: SLURM_STEP_ID=-6",
        BATCH | {"SLURM_STEP_ID": "-6", "SLURM_STEPID": "-6", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "4000"},
        "none",
        (0, 1, 0, 1, 0, 1),
        text="prefix it with srun",
    ),
    Scenario("slurm, a batch script without -n", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "none", (0, 1)),
]

# src/shell/task.c and src/shell/shell.c of flux-core
FLUX = {
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "\u0192D2e73NP",
    "FLUX_URI": "local:///tmp/flux/local-0",
    "FLUX_KVS_NAMESPACE": "job-1",
}
FLUX_PMI = {"PMI_FD": "12", "PMI_RANK": "3", "PMI_SIZE": "4"}  # src/shell/pmi/pmi.c
FLUX_KNOWN = (3, 4, 1, None, None, 2)
ON_TWO = STEP | {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
JSM = {f"JSM_NAMESPACE_{name}": value for name, value in [("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0")]}
FLUXES = [
    Scenario("flux 0.13: the id is a number", FLUX | {"FLUX_JOB_ID": "36825"}, "flux", FLUX_KNOWN),
    Scenario("flux 0.79: FLUX_JOB_ID_PATH", FLUX | FLUX_PMI | {"FLUX_JOB_ID_PATH": "/f1/f2"}, "flux", FLUX_KNOWN),
    Scenario("flux, -o pmi=none", FLUX, "flux", FLUX_KNOWN),
    # src/broker/runat.c removes SLURM_* from the environment of the initial program since 0.50 only
    Scenario("flux 0.40 that srun has started on two nodes", ON_TWO | FLUX | FLUX_PMI, "flux", FLUX_KNOWN),
    Scenario("flux 0.40 that jsrun has started on two nodes", JSM | FLUX | FLUX_PMI, "flux", FLUX_KNOWN),
    Scenario(
        "flux 0.40 that jsrun of Spectrum MPI has started, -o mpi=spectrum",  # src/shell/lua.d/mpi/spectrum.lua
        JSM | {"OMPI_COMM_WORLD_SIZE": "2"} | FLUX | FLUX_PMI | {"OMPI_COMM_WORLD_RANK": "3"},
        "flux",
        FLUX_KNOWN,
    ),
    Scenario("flux 0.60 -o mpi=spectrum", FLUX | FLUX_PMI | {"OMPI_COMM_WORLD_RANK": "3"}, "flux", FLUX_KNOWN),
    Scenario(
        "flux 0.88 that PALS has started",  # PALS_* are removed since 0.80 only
        {"PALS_RANKID": "0", "PALS_NRANKS": "2", "PALS_LOCAL_RANKID": "0"} | FLUX | FLUX_PMI,
        "flux",
        FLUX_KNOWN,
    ),
    Scenario(
        "flux that mpiexec of MPICH has started",
        FLUX | FLUX_PMI | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        "flux",
        FLUX_KNOWN,
    ),
    Scenario(
        "flux, mpiexec of MPICH in a task",
        FLUX | {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        "mpich",
        (1, 2, 1, 2, 0, 1),
    ),
    Scenario(
        "flux, mpirun of Open MPI in a task",
        FLUX | FLUX_PMI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        "openmpi",
        (1, 2),
    ),
    # Up to 0.40, src/broker/broker.c removes FLUX_JOB_ID, _SIZE and _NNODES from a batch script, and no others
    Scenario(
        "flux 0.40, the script of flux batch",
        {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_URI": "local:///tmp/flux"},
        "error",
        text="in the script of flux batch or flux alloc, unset the FLUX_TASK_ variables",
    ),
    Scenario("flux 0.60, the script of flux batch", {"FLUX_URI": "local:///tmp/flux"}, "none", (0, 1)),
]

# src/pm/hydra/proxy/pmip_cb.c of MPICH; MPI_LOCALRANKID and MPI_LOCALNRANKS since 3.3
HYDRA = {"PMI_FD": "9", "PMI_RANK": "2", "PMI_SIZE": "4"}
LOCAL = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPI = [
    Scenario("mpich 3.2: no number of the host", HYDRA, "pmi", (2, 4)),
    Scenario("mpich 3.2, -bootstrap slurm in a job", HYDRA | BATCH, "pmi", (2, 4)),
    Scenario("mpich 4.3: PMI_HOSTNAME", HYDRA | LOCAL | {"PMI_HOSTNAME": "node1"}, "mpich", (2, 4, 0, 2)),
    Scenario("mpich, MPI_Comm_spawn", HYDRA | LOCAL | {"PMI_SPAWNED": "1"}, "mpich", (2, 4, 0, 2)),
    Scenario(
        "mpich -pmi-port, one rank on each host",
        {"PMI_PORT": "node0:4000", "PMI_ID": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        "error",
        text="MPI_LOCALRANKID=0 and MPI_LOCALNRANKS=1",
    ),
    Scenario("mpich 3.2 -pmi-port", {"PMI_PORT": "node0:4000", "PMI_ID": "0"}, "error", text="PMI_ID=0"),
    Scenario("mpiexec.gforker", {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_DEBUG": "0"}, "pmi", (1, 2)),
    Scenario("srun --mpi=pmi2", HYDRA | STEP | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "slurm", (5, 7, 1, 2, 2, 4)),
    # orte/mca/odls/base in 1.4: no OMPI_COMM_WORLD_NODE_RANK; orte_schizo_ompi from 2.0
    Scenario("openmpi 1.4", OMPI, "openmpi", (2, 4, 0, 2)),
    Scenario("openmpi 3.1", OMPI | {"OMPI_COMM_WORLD_NODE_RANK": "0", "PMIX_RANK": "2"}, "openmpi", (2, 4, 0, 2)),
    # src/mca/pmdl/ompi of PMIx 4 to 6, which sets them for PRRTE
    Scenario(
        "openmpi 5.0 and main",
        OMPI | {"PRTE_LAUNCHED": "1", "OMPI_FIRST_RANKS": "0", "OMPI_APP_SIZES": "4", "PMIX_NAMESPACE": "prterun-1@1"},
        "openmpi",
        (2, 4, 0, 2),
    ),
    # PMIx 3, and a PRRTE without the personality of Open MPI
    Scenario(
        "prterun --personality prte",
        {"PMIX_RANK": "2", "PMIX_NAMESPACE": "p", "PRTE_LAUNCHED": "1"},
        "error",
        text="PMIX_RANK=2",
    ),
    Scenario("mpirun of Open MPI through plm/pals", {"PALS_RANKID": "1", "PALS_NRANKS": "2"} | OMPI, "openmpi", (2, 4)),
    Scenario("srun --mpi=pmix", STEP | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, "slurm", (5, 7)),
]

# torch/distributed/elastic/agent/server/local_elastic_agent.py
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
EVERY = (3, 4, 1, 2, 1, 2)
TORCH = [
    Scenario("torch 1.8, torch.distributed.launch without --use_env", HAND, "plain", (3, 4), "node0"),
    Scenario("torch 1.8, torch.distributed.launch --use_env", HAND | {"LOCAL_RANK": "1"}, "plain", (3, 4, 1), "node0"),
    Scenario(
        "torchelastic 0.2.0: no TORCHELASTIC_RUN_ID",
        {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"},
        "plain",
        EVERY,
        "node0",
    ),
    Scenario("torch 1.9", TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", EVERY, "node0"),
    Scenario(
        "torch 2.2 static",
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_ASYNC_ERROR_HANDLING": "1"},
        "torchrun",
        EVERY,
        "node0",
    ),
    # deepspeed/launcher/launch.py: LOCAL_RANK since 0.3.1, CROSS_RANK, CROSS_SIZE and LOCAL_SIZE since 0.5
    Scenario("deepspeed 0.4", HAND | {"LOCAL_RANK": "1"}, "plain", (3, 4, 1), "node0"),
    Scenario(
        "deepspeed 0.16",
        HAND | {"LOCAL_RANK": "1", "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"},
        "deepspeed",
        EVERY,
        "node0",
    ),
    # deepspeed/elasticity/elastic_agent.py, started by launch.py
    Scenario(
        "deepspeed --elastic_training",
        TORCHRUN | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"},
        "torchrun",
        EVERY,
        "node0",
    ),
    # IMPIRunner and MPICHRunner of deepspeed/launcher/multinode_runner.py
    Scenario(
        "deepspeed --launcher impi",
        HAND | HYDRA | LOCAL | {"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
        "plain",
        (3, 4, 1, 2),
        "node0",
    ),
    Scenario(
        "deepspeed --launcher mpich, before launcher_helper.py has set RANK",
        HYDRA | LOCAL | {"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        "mpich",
        (2, 4, 0, 2),
        "node0",
    ),
    Scenario("deepspeed --launcher openmpi", OMPI | {"UCX_TLS": "tcp"}, "openmpi", (2, 4, 0, 2)),
    Scenario("deepspeed --launcher slurm", STEP | {"NCCL_DEBUG": "INFO"}, "slurm", (5, 7, 1, 2, 2, 4), "node0"),
    # deepspeed/comm/comm.py, after patch_aml_env_for_torch_nccl_backend
    Scenario("deepspeed in azureml", OMPI | HAND | {"RANK": "2", "LOCAL_RANK": "0"}, "plain", (2, 4, 0, 2), "node0"),
    # accelerate/utils/launch.py, prepare_simple_launcher_cmd_env with mpirun_hostfile
    Scenario(
        "accelerate launch --mpirun_hostfile",
        OMPI | {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        "openmpi",
        (2, 4, 0, 2),
        "node0",
    ),
    Scenario("accelerate 0.12: MIXED_PRECISION", TORCHRUN | {"MIXED_PRECISION": "no"}, "torchrun", EVERY, "node0"),
    # pytorch_lightning 0.9 to 1.5, then lightning/fabric/strategies/launchers/subprocess_script.py
    Scenario(
        "lightning 1.2",
        {
            "LOCAL_RANK": "1",
            "NODE_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "12910",
            "PL_IN_DDP_SUBPROCESS": "1",
            "PL_TRAINER_GPUS": "0,1",
        },
        "lightning",
        (1, 2, 1, None, 0),
        "127.0.0.1",
    ),
    # composer/cli/launcher.py since 0.8
    Scenario(
        "composer 0.32, with BASE_RANK",
        HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1", "BASE_RANK": "2"},
        "plain",
        (3, 4, 1, 2, 1),
        "node0",
    ),
    # _set_torch_distributed_env_vars in ray/train/torch/config.py
    Scenario(
        "ray 2.55",
        HAND
        | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
        | {"RAY_JOB_ID": "01000000", "ACCELERATE_TORCH_DEVICE": "cpu"},
        "ray",
        (3, 4, 1, 2, 1),
        "node0",
    ),
]

POD = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "1", "RANK": "1", "WORLD_SIZE": "2"}
PET = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "train-master-0", "PET_MASTER_PORT": "23456"}
CLOUD = [
    # pkg/controller.v1/pytorch/envvar.go of Kubeflow's training operator, 1.3 to 1.9
    Scenario("training-operator 1.3", POD, "plain", (1, 2), "train-master-0"),
    Scenario("training-operator 1.7", POD | PET, "plain", (1, 2), "train-master-0"),
    # pytorch_defaults.go: PET_NPROC_PER_NODE is "auto" where the job has no nprocPerNode, and WORLD_SIZE the pods
    Scenario(
        "training-operator 1.8, no nprocPerNode",
        POD | PET | {"PET_NPROC_PER_NODE": "auto"},
        "plain",
        (1, 2),
        "train-master-0",
    ),
    Scenario(
        "training-operator 1.8, nprocPerNode 2, without torchrun",
        POD | PET | {"PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4"},
        "error",
        text="counts the pods of a Kubeflow job",
    ),
    Scenario(
        "training-operator 1.4, elastic, without torchrun",
        {"PET_NNODES": "1:2", "PET_N_PROC_PER_NODE": "1", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": "train"},
        "none",
        (0, 1),
        text="start it with torchrun",
    ),
    # pkg/runtime/framework/plugins/torch of the Trainer
    Scenario(
        "trainer 2.3",
        {"JOB_COMPLETION_INDEX": "1", "PET_NPROC_PER_NODE": "1"} | PET,
        "kubeflow",
        (1, 2, 0, 1, 1, 2),
        "train-master-0",
    ),
    Scenario(
        "trainer 2.3, numProcPerNode auto, without torchrun",
        {"JOB_COMPLETION_INDEX": "1", "PET_NPROC_PER_NODE": "auto"} | PET,
        "none",
        (0, 1),
        text="start it with torchrun",
    ),
    # training.py of sagemaker-pytorch-training-toolkit gives every process an address, also one that trains alone
    Scenario(
        "sagemaker-pytorch-training, no distribution",
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"},
        "none",
        (0, 1),
    ),
    # mpi.py of sagemaker-training-toolkit 5
    Scenario("sagemaker-training 5, mpi", OMPI | {"SM_HOSTS": '["algo-1", "algo-2"]'}, "openmpi", (2, 4, 0, 2)),
]
SCENARIOS = [*SLURM, *FLUXES, *MPI, *TORCH, *CLOUD]


@each_row("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_variables_of_another_version(scenario: Scenario) -> None:
    if scenario.launcher == "error":
        with pytest.raises(LauncherEnvironmentError) as caught:
            detect(scenario.environ)
        assert scenario.text in str(caught.value)
        return
    reading = detect(scenario.environ)
    found = {name: fact.value for name, fact in reading.known_topology().items()}
    known = dict(zip(SIX, scenario.known, strict=False))
    assert (reading.launcher, {name: found.get(name) for name in known}) == (scenario.launcher, known)
    assert scenario.host is None or (reading.host and reading.host.value) == scenario.host
    assert scenario.text in " ".join(reading.warnings)
