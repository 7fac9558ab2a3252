"""The readers whose launchers cannot run here, and those of the frameworks' launchers: one table for all.

Each entry has a complete environment of rank 3 of 8, four ranks on each of two nodes, and the variables without which
there is no rank.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankwise._environment.detect import LAUNCHERS, detect
from rankwise._environment.facts import LaunchEnvironment
from rankwise._environment.variables import VARIABLES
from rankwise.errors import LauncherEnvironmentError
from tests.tables import each_row

Environ = dict[str, str]
DATA = Path(__file__).parents[1] / "data"
ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@dataclass(frozen=True)
class Case:
    """The variables of a rank, and its position.

    Attributes:
        name: The launcher.
        environ: The variables.
        needed: Those without which `detect` raises, or finds another launcher (`alone`).
        known: rank, world_size, local_rank, local_world_size, node_rank, num_nodes; None for those that are not set.
        host: The address of rank zero, or the file that has it.
    """

    name: str
    environ: Environ
    needed: tuple[str, ...]
    known: tuple[int | None, ...]
    host: str | None = None
    job: str | None = None
    alone: tuple[str, ...] = ()


def mpi(prefix: str) -> Environ:
    return {f"{prefix}RANK": "3", f"{prefix}SIZE": "8", f"{prefix}LOCAL_RANK": "3", f"{prefix}LOCAL_SIZE": "4"}


OPENMPI = mpi("OMPI_COMM_WORLD_") | {"PMIX_NAMESPACE": "prterun-1@1"}
JSRUN = mpi("JSM_NAMESPACE_") | {"LSB_JOBID": "77", "LSB_DJOB_RANKFILE": "/lsf/rankfile"}
PALS = {
    "PALS_RANKID": "3",
    "PALS_NRANKS": "8",
    "PALS_LOCAL_RANKID": "3",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "0",
    "PALS_APID": "a-1",
    "PBS_NODEFILE": "/pbs/nodes",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "3",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f1",
    "PMI_FD": "20",
    "PMI_RANK": "3",
    "PMI_SIZE": "8",
}
SAGEMAKER = {
    "SM_HOSTS": json.dumps([f"algo-{number}" for number in range(8)]),
    "SM_CURRENT_HOST": "algo-3",
    "TRAINING_JOB_NAME": "train",
    "WORLD_SIZE": "8",
}
KUBEFLOW = {
    "PET_NODE_RANK": "3",
    "PET_NNODES": "8",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "node0",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "3",
}
PBS = {"PBS_VNODENUM": "3", "PBS_TASKNUM": "5", "PBS_JOBID": "1.pbs", "PBS_NODEFILE": "/pbs/nodes", "WORLD_SIZE": "8"}
LIGHTNING = ADDRESS | {"LOCAL_RANK": "3", "NODE_RANK": "0", "WORLD_SIZE": "8"}
TORCH = ADDRESS | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
FOUR_ON_EACH = (3, 8, 3, 4, None, None)
CASES = [
    Case("lsf", JSRUN, ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), FOUR_ON_EACH, "LSB_DJOB_RANKFILE", "77"),
    Case("pals", PALS, ("PALS_RANKID", "PALS_NRANKS"), (3, 8, 3, 4, 0, None), "PBS_NODEFILE", "a-1"),
    Case("flux", FLUX, ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), (3, 8, 3, None, None, 2), None, "f1"),
    Case("mvapich2", mpi("MV2_COMM_WORLD_"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), FOUR_ON_EACH),
    Case("mvapich3", mpi("MVP_COMM_WORLD_"), ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"), FOUR_ON_EACH),
    Case(
        "platformmpi",
        {"MPI_RANKID": "3", "MPI_NRANKS": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"},
        ("MPI_RANKID", "MPI_NRANKS"),
        FOUR_ON_EACH,
    ),
    Case("mpt", {"MPT_LRANK": "3", "PMI_RANK": "3", "PMI_SIZE": "8"}, ("PMI_RANK", "PMI_SIZE"), (3, 8, 3)),
    Case("alps", ADDRESS | {"ALPS_APP_PE": "3", "WORLD_SIZE": "8"}, ("ALPS_APP_PE", "WORLD_SIZE"), (3, 8), "node0"),
    Case(
        "azureml",
        OPENMPI | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        FOUR_ON_EACH,
        "10.0.0.4",
        "prterun-1@1",
    ),
    Case("kubeflow", KUBEFLOW, (), (3, 8, 0, 1, 3, 8), "node0", alone=("PET_NODE_RANK", "PET_NNODES")),
    Case("pbs", PBS, ("PBS_VNODENUM",), (3, 8), "PBS_NODEFILE", "1.pbs", alone=("WORLD_SIZE",)),
    Case("sagemaker", SAGEMAKER, ("SM_HOSTS",), (3, 8, 0, 1, 3, 8), "algo-0", "train", alone=("WORLD_SIZE",)),
    Case(
        "kubernetes",
        ADDRESS | {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "8"},
        ("JOB_COMPLETION_INDEX",),
        (3, 8),
        "node0",
        alone=("WORLD_SIZE",),
    ),
    Case(
        "submitit",
        {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": "4711",
            "SUBMITIT_LOCAL_GLOBALID": "1",
            "SUBMITIT_LOCAL_NTASKS": "2",
            "SUBMITIT_LOCAL_LOCALID": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        },
        ("SUBMITIT_LOCAL_NTASKS",),
        (1, 2, 1, 2, 0, 1),
        job="4711",
        alone=("SUBMITIT_LOCAL_GLOBALID",),
    ),
    Case("lightning", LIGHTNING, ("LOCAL_RANK", "NODE_RANK"), (3, 8, 3, None, 0), "node0"),
    Case("ray", TORCH | {"LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0", "RAY_JOB_ID": "1"}, (), (3, 8, 3, 4, 0), "node0"),
    Case(
        "deepspeed", TORCH | {"LOCAL_SIZE": "4", "CROSS_RANK": "0", "CROSS_SIZE": "2"}, (), (3, 8, 3, 4, 0, 2), "node0"
    ),
    Case(
        "accelerate",
        TORCH | {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no", "GROUP_RANK": "0"},
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        (3, 8, 3, None, 0),
        "node0",
        "none",
    ),
]
NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
each_case = each_row("case", CASES, ids=lambda case: case.name)


def without(environ: Environ, *names: str) -> Environ:
    return {name: value for name, value in environ.items() if name not in names}


def host_of(reading: LaunchEnvironment) -> str | None:
    if reading.host is not None:
        return reading.host.value
    return reading.host_file.source if reading.host_file is not None else None


@each_case
def test_a_complete_environment_is_read(case: Case) -> None:
    reading = detect(case.environ)
    assert reading.launcher == case.name
    known = dict(zip(NUMBERS, case.known, strict=False))
    assert {name: fact.value for name, fact in reading.known_topology().items()} == {
        name: value for name, value in known.items() if value is not None
    }
    assert (host_of(reading), reading.job and reading.job.value) == (case.host, case.job)


@each_case
def test_the_launcher_can_be_named(case: Case) -> None:
    assert detect(case.environ, case.name) == detect(case.environ)


@each_case
def test_every_fact_is_from_a_variable_of_the_reader(case: Case) -> None:
    (launcher,) = (launcher for launcher in LAUNCHERS if launcher.name == case.name)
    for fact in detect(case.environ).facts().values():
        assert fact is None or any(name in fact.source for name in launcher.variables)


def missing() -> Iterator[tuple[Case, str]]:
    for case in CASES:
        yield from ((case, name) for name in case.needed)


@each_row(("case", "name"), [*missing()], ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_rank_without_a_needed_variable_is_an_error_that_names_it(case: Case, name: str) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        detect(without(case.environ, name), case.name)
    assert name in str(caught.value)
    with pytest.raises(LauncherEnvironmentError):  # and it never runs alone
        detect(without(case.environ, name))


@each_case
def test_without_what_shows_more_ranks_a_process_runs_alone(case: Case) -> None:
    for name in case.alone:
        assert detect(without(case.environ, name, "JOB_COMPLETION_INDEX")).launcher == "none"


def numeric() -> Iterator[tuple[Case, str]]:
    for case in CASES:
        yield from ((case, name) for name, value in case.environ.items() if value.isdecimal() and name not in TEXTS)


# Numbers that are read as text, or not at all; PET_NPROC_PER_NODE is "auto" in a pod for torchrun.
TEXTS = {"SUBMITIT_LOCAL_JOB_ID", "LSB_JOBID", "PMI_FD", "RAY_JOB_ID", "PBS_TASKNUM", "PET_NPROC_PER_NODE"}


@each_row("garbage", ["", "x", "-1", "1.5", "9" * 40, "\uff13"])
@each_row(("case", "name"), [*numeric()], ids=lambda value: value if isinstance(value, str) else value.name)
def test_garbage_is_an_error_that_names_the_variable(case: Case, name: str, garbage: str) -> None:
    if (case.name, name) in {("flux", "PMI_RANK"), ("flux", "PMI_SIZE"), ("kubeflow", "JOB_COMPLETION_INDEX")}:
        assert detect(case.environ | {name: garbage}) == detect(case.environ), "it is not read"
        return
    with pytest.raises(LauncherEnvironmentError, match=name):
        detect(case.environ | {name: garbage})


@each_row(
    ("environ", "named"),
    [
        (JSRUN | {"JSM_NAMESPACE_RANK": "8"}, ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"]),
        (JSRUN | {"JSM_NAMESPACE_LOCAL_SIZE": "9"}, ["JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_SIZE"]),
        (JSRUN | {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "JSM_NAMESPACE_SIZE"]),
        (PALS | {"PALS_LOCAL_RANKID": "4"}, ["PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"]),
        (FLUX | {"FLUX_JOB_NNODES": "9"}, ["FLUX_JOB_NNODES", "FLUX_JOB_SIZE"]),
        (FLUX | {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "FLUX_JOB_SIZE"]),
        (mpi("MV2_COMM_WORLD_") | {"MV2_COMM_WORLD_LOCAL_RANK": "4"}, ["MV2_COMM_WORLD_LOCAL_SIZE"]),
        ({"MPT_LRANK": "0"}, ["PMI_RANK", "MPT_LRANK", "RANK and WORLD_SIZE"]),
        ({"ALPS_APP_PE": "0"}, ["WORLD_SIZE", "aprun -n 4 -e"]),
        (KUBEFLOW | {"PET_NODE_RANK": "8"}, ["PET_NODE_RANK", "PET_NNODES"]),
        (KUBEFLOW | {"PET_NNODES": "1:2"}, ["PET_NNODES='1:2'"]),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-9"}, ["SM_CURRENT_HOST='algo-9'", "SM_HOSTS"]),
        (SAGEMAKER | {"WORLD_SIZE": "64"}, ["WORLD_SIZE=64", "SM_HOSTS is 8"]),
        *(
            (SAGEMAKER | {"SM_HOSTS": text}, ["SM_HOSTS="])
            for text in ("", "[", "[]", "{}", "[1]", '["a","a"]', "[" * 9999)
        ),
        (LIGHTNING | {"LOCAL_RANK": "8"}, ["LOCAL_RANK", "WORLD_SIZE"]),
        (LIGHTNING | {"NODE_RANK": "1", "LOCAL_RANK": "0"}, ["NODE_RANK=1", "[1, 2, 4]", "set RANK"]),
        (LIGHTNING | {"NODE_RANK": "2", "LOCAL_RANK": "3"}, ["contradict each other"]),
        (LIGHTNING | {"NODE_RANK": "1", "WORLD_SIZE": "9" * 18}, ["WORLD_SIZE"]),
        (FLUX | {"RANK": "3", "WORLD_SIZE": "16"}, ["WORLD_SIZE=16", "FLUX_JOB_SIZE=8", "LOCAL_RANK"]),
        (PALS | {"RANK": "3", "WORLD_SIZE": "16"}, ["WORLD_SIZE=16", "PALS_NRANKS=8"]),
    ],
)
def test_contradictions_name_the_variables(environ: Environ, named: list[str]) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        detect(environ)
    for text in named:
        assert text in str(caught.value)


SLURM_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SLURM_ALONE = SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "x"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@each_row(
    ("environ", "launcher", "rank"),
    [
        (PALS | OPENMPI | {"PALS_RANKID": "0"}, "openmpi", 3),  # PALS starts the daemons of mpirun
        (PALS | {"PMI_RANK": "3", "PMI_SIZE": "8"}, "pals", 3),
        (PALS | SLURM_TASK, "slurm", 1),
        (PBS | HYDRA | {"WORLD_SIZE": "2"}, "mpich", 1),
        (PBS | OPENMPI, "openmpi", 3),
        (PBS | SLURM_TASK | {"WORLD_SIZE": "2"}, "slurm", 1),
        (without(PBS, "WORLD_SIZE") | PALS, "pals", 3),
        (JSRUN | OPENMPI, "lsf", 3),  # Spectrum MPI
        (JSRUN | OPENMPI | {"OMPI_COMM_WORLD_RANK": "5"}, "openmpi", 5),  # an mpirun in a task of jsrun
        (
            JSRUN | {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_LOCAL_RANK": "0"} | OPENMPI,
            "openmpi",
            3,
        ),
        (mpi("MV2_COMM_WORLD_") | HYDRA, "mpich", 1),
        (SLURM_ALONE | LIGHTNING, "lightning", 3),  # srun --pty bash, then Lightning
        (SLURM_TASK | LIGHTNING | {"WORLD_SIZE": "2"}, "slurm", 1),  # exported by a batch script
        (SLURM_TASK | TORCH | {"LOCAL_SIZE": "4", "CROSS_RANK": "0", "CROSS_SIZE": "2"}, "deepspeed", 3),
        (KUBEFLOW | TORCH | {"LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"}, "plain", 3),
        (KUBEFLOW | OPENMPI, "openmpi", 3),
        (SAGEMAKER | OPENMPI, "openmpi", 3),
        (without(SAGEMAKER, "WORLD_SIZE") | TORCHRUN, "torchrun", 3),
        *((case.environ | TORCHRUN | {"RANK": "2"}, "torchrun", 2) for case in CASES if case.name != "accelerate"),
    ],
)
def test_the_innermost_launcher_is_read(environ: Environ, launcher: str, rank: int) -> None:
    reading = detect(environ)
    assert (reading.launcher, reading.rank.value) == (launcher, rank)


@pytest.mark.parametrize(
    ("node_rank", "local_rank", "world_size", "rank"),
    [(0, 5, 8, 5), (1, 3, 8, 7), (1, 0, 2, 1), (3, 1, 8, 7), (1, 2, 6, 5)],
)
def test_the_rank_of_lightning_is_computed_where_one_number_of_processes_fits(
    node_rank: int, local_rank: int, world_size: int, rank: int
) -> None:
    numbers = {"NODE_RANK": node_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    reading = detect(ADDRESS | {name: str(number) for name, number in numbers.items()})
    assert (reading.launcher, reading.rank.value) == ("lightning", rank)


def test_one_node_is_known_as_one_host() -> None:
    flux = detect(FLUX | {"FLUX_JOB_NNODES": "1"})
    assert flux.is_one_host
    assert (flux.node_rank and flux.node_rank.value, flux.num_nodes and flux.num_nodes.value) == (0, 1)
    jsrun = detect(JSRUN | {"JSM_NAMESPACE_LOCAL_SIZE": "8"})
    assert jsrun.is_one_host


def test_pals_has_other_names_for_some_numbers() -> None:
    environ = without(PALS, "PALS_NRANKS", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID")
    reading = detect(environ | {"PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4", "PMI_LOCAL_RANK": "3", "PMI_RANK": "3"})
    assert [str(fact) for fact in reading.known_topology().values()] == [
        "3 (from PALS_RANKID)",
        "8 (from PMI_SIZE)",
        "3 (from PMI_LOCAL_RANK)",
        "4 (from PMI_LOCAL_SIZE)",
        "0 (from PALS_NODEID)",
    ]


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, "10.0.0.4"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, "10.0.0.5"),
        ({"AZ_BATCH_MASTER_NODE": "[fd00::4]:6000"}, "fd00::4"),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "MASTER_ADDR": "node0"}, "node0"),
    ],
)
def test_azureml_gives_open_mpi_an_address(variables: Environ, host: str) -> None:
    reading = detect(OPENMPI | variables)
    assert (reading.launcher, reading.host and reading.host.value, reading.port) == ("azureml", host, None)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"PBS_JOBID": "1.pbs", "PBS_NUM_NODES": "2", "PBS_TASKNUM": "1", "PBS_VNODENUM": "0"},
            "start it with mpiexec",
        ),
        (without(SAGEMAKER, "WORLD_SIZE"), "SM_HOSTS="),
    ],
)
def test_an_allocation_of_several_nodes_that_is_not_used_is_a_warning(environ: Environ, text: str) -> None:
    reading = detect(environ)
    assert reading.launcher == "none"
    assert text in reading.warnings[0]


def test_a_batch_script_of_pbs_that_exports_the_world_size_is_no_rank() -> None:
    with pytest.raises(LauncherEnvironmentError, match="WORLD_SIZE=8"):
        detect(PBS | {"PBS_TASKNUM": "1", "PBS_VNODENUM": "0"})


def test_no_reader_takes_the_variables_of_another() -> None:
    present = {
        case.name: [launcher.name for launcher in LAUNCHERS[:-1] if launcher.present(case.environ)] for case in CASES
    }
    also = {  # variables that two have: the first of LAUNCHERS is chosen, as named in `detect`
        "ray": ["plain"],
        "deepspeed": ["plain"],
        "azureml": ["openmpi"],
        "flux": ["pmi"],
        "mpt": ["pmi"],
        "accelerate": ["torchrun", "plain"],
    }
    for name, names in present.items():
        assert names == [name, *also.get(name, [])]


def test_recorded_environments_are_not_read_by_the_readers_of_others() -> None:
    unverified = {launcher.name for launcher in LAUNCHERS if not launcher.verified}
    for path in DATA.glob("*/*.json"):
        for process, environ in json.loads(path.read_text()).items():
            try:
                assert detect(environ).launcher not in unverified, (path, process)
            except LauncherEnvironmentError:
                assert path.parent.name == "k8s-v1", "pods, with several processes in each"


def test_variables_are_data() -> None:
    for launcher in LAUNCHERS:
        assert launcher.name
        assert launcher.description
        assert len(set(launcher.variables)) == len(launcher.variables) > 0, launcher.name
        assert set(launcher.variables) <= VARIABLES
    assert not set(itertools.chain.from_iterable(case.environ for case in CASES)) & {"HOSTNAME"}
