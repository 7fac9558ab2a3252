"""Detection: the order, half environments, garbage, and that nothing but the argument is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankwise._environment.detect import LAUNCHERS, detect
from rankwise._environment.nesting import run_variables
from rankwise._session.api import init
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError
from tests.tables import each_row

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_NTASKS": "2",
}
SLURM_ALONE = SLURM | {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def test_nothing_set_is_a_world_of_one() -> None:
    reading = detect({})
    assert reading.launcher == "none"
    assert {name: fact.value for name, fact in reading.known_topology().items()} == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "num_nodes": 1,
    }


def test_every_fact_names_its_variable() -> None:
    reading = detect(TORCHRUN)
    assert [str(fact) for fact in reading.facts().values()] == [
        "3 (from RANK)",
        "4 (from WORLD_SIZE)",
        "1 (from LOCAL_RANK)",
        "2 (from LOCAL_WORLD_SIZE)",
        "1 (from GROUP_RANK)",
        "2 (from GROUP_WORLD_SIZE)",
        "node0 (from MASTER_ADDR)",
        "29500 (from MASTER_PORT)",
        "none (from TORCHELASTIC_RUN_ID)",
    ]
    assert reading.agent_store
    assert reading.attempt == 2


@each_row(
    ("environ", "launcher", "rank"),
    [
        (SLURM, "slurm", 1),
        (SLURM | PMI, "mpich", 2),
        (SLURM | OPENMPI, "openmpi", 5),
        (OPENMPI | PMI | {"PMI_RANK": "0", "PMI_SIZE": "1"}, "openmpi", 5),  # mpiexec.hydra -n 1 mpirun
        (SLURM | PMI | OPENMPI | PLAIN | {"LOCAL_RANK": "0"}, "plain", 1),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, "plain", 0),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "pmi", 0),
        (SLURM | PMI | OPENMPI | PLAIN | TORCHRUN, "torchrun", 3),
        (SLURM | TORCHRUN | {"RANKWISE_RANK": "0", "RANKWISE_WORLD_SIZE": "9"}, "override", 0),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"} | SLURM, "slurm", 1),  # srun --mpi=pmi2
        ({"OMPI_MCA_plm_slurm_args": "--external-launcher"}, "none", 0),  # Slurm 24.11 sets it everywhere
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "none", 0),  # a batch script
        (SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, "none", 0),  # an interactive step
    ],
)
def test_the_innermost_launcher_is_believed(environ: dict[str, str], launcher: str, rank: int) -> None:
    reading = detect(environ)
    assert (reading.launcher, reading.rank.value) == (launcher, rank)


def test_an_mpi_that_has_started_another_one_is_refused() -> None:
    """Neither of them says that it is the inner one."""
    with pytest.raises(LauncherEnvironmentError, match=r"OMPI_COMM_WORLD_RANK=5 .*PMI_RANK=2 .*launcher='openmpi'"):
        detect(OPENMPI | PMI)
    assert detect(OPENMPI | PMI, "mpich").rank.value == 2
    agreeing = {"PMI_RANK": OPENMPI["OMPI_COMM_WORLD_RANK"], "PMI_SIZE": OPENMPI["OMPI_COMM_WORLD_SIZE"]}
    assert detect(OPENMPI | PMI | agreeing).launcher == "openmpi"


@each_row(
    "environ",
    [
        {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": ""}, {"RANK": "0"}, {"RANK": "-1"},
        {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": ""},
        {"RANK": "-1", "LOCAL_RANK": "-1", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    ],
)  # fmt: skip
def test_variables_that_scripts_set_where_they_run_alone(environ: dict[str, str]) -> None:
    """Only a value that says that there are others makes an incomplete set an error; and a launcher goes first."""
    reading = detect(environ)
    assert (reading.launcher, reading.rank.value, reading.world_size.value) == ("none", 0, 1)
    if "WORLD_SIZE" not in environ:  # which would contradict the number of tasks
        assert detect(SLURM | environ).launcher == "slurm"


@each_row(
    ("environ", "named"),
    [
        ({"RANK": "1"}, ["WORLD_SIZE", "RANK"]),
        ({"RANK": "0", "LOCAL_RANK": "1"}, ["WORLD_SIZE", "RANK"]),
        ({"WORLD_SIZE": "4"}, ["RANK", "WORLD_SIZE=4"]),
        ({"LOCAL_RANK": "1"}, ["RANK", "LOCAL_RANK=1"]),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, ["RANK", "LOCAL_WORLD_SIZE=4"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK", "WORLD_SIZE", "4"]),
        ({"RANK": "x", "WORLD_SIZE": "4"}, ["RANK='x'"]),
        ({"RANK": "1.5", "WORLD_SIZE": "4"}, ["RANK='1.5'"]),
        ({"RANK": "1_0", "WORLD_SIZE": "40"}, ["RANK='1_0'"]),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "40"}, ["RANK='999"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK=-1", "negative"]),
        ({"RANK": "", "WORLD_SIZE": "4"}, ["RANK", "empty"]),
        ({"RANK": "1", "WORLD_SIZE": ""}, ["WORLD_SIZE", "empty"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["world_size", "WORLD_SIZE"]),
        (PLAIN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        (PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        (PLAIN | {"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE", "WORLD_SIZE"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["RANK", "TORCHELASTIC_RUN_ID"]),
        ({"RANKWISE_WORLD_SIZE": "2"}, ["RANKWISE_RANK"]),
        (SLURM | {"RANKWISE_MASTER_ADDR": "a"}, ["RANKWISE_RANK", "RANKWISE_MASTER_ADDR=a"]),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}, ["PMIX_RANK=1", "mpirun"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE"]),
        (OPENMPI | {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE"]),
        ({"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, ["PMI_SIZE"]),
        (SLURM | {"SLURM_STEP_NUM_TASKS": ""}, ["SLURM_STEP_NUM_TASKS"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS=2"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": f"1(x{10**17})"}, [f"has {10**17} tasks on {10**17} nodes"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "9" * 5000}, ["is not a list like 2(x3),1"]),
        ({"RANK": "0", "WORLD_SIZE": str(10**17)}, [f"world_size {10**17} (from WORLD_SIZE) is above 1048576"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE='two'"]),
        (SLURM | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS"]),
        (SLURM | {"SLURM_STEP_NODELIST": "node[0-"}, ["node[0-"]),
        (SLURM | {"RANK": "1", "WORLD_SIZE": "8"}, ["RANK=1", "WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=2", "LOCAL_RANK"]),
        (OPENMPI | {"RANK": "1", "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=6"]),
        ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE is not set"]),
        ({"PMI_RANK": "0"}, ["PMI_RANK=0", "PMI_SIZE is not set"]),
        ({"PMI_SIZE": "", "PMI_RANK": "0"}, ["PMI_SIZE is set but empty"]),
        ({"PMI_SIZE": "-4", "PMI_RANK": "0"}, ["PMI_SIZE=-4 is negative"]),
        ({"PMI_SIZE": "x"}, ["PMI_SIZE='x' is not a whole number"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "Open MPI"]),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ["OMPI_COMM_WORLD_LOCAL_RANK=1"]),
        ({"MPI_LOCALNRANKS": "2"}, ["MPI_LOCALNRANKS=2"]),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, ["MPI_LOCALRANKID=0 and MPI_LOCALNRANKS=1"]),
        ({"PMI_ID": "0"}, ["PMI_ID=0", "-pmi-port"]),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, ["MV2_COMM_WORLD_LOCAL_RANK=1", "MVAPICH 2"]),
        ({"MVP_COMM_WORLD_LOCAL_RANK": "0"}, ["MVP_COMM_WORLD_LOCAL_RANK=0", "MVAPICH 3"]),
        ({"JSM_NAMESPACE_LOCAL_SIZE": "2"}, ["JSM_NAMESPACE_LOCAL_SIZE=2", "jsrun"]),
        ({"PALS_LOCAL_RANKID": "0"}, ["PALS_LOCAL_RANKID=0", "PALS"]),
        ({"FLUX_TASK_LOCAL_ID": "1"}, ["FLUX_TASK_LOCAL_ID=1", "Flux"]),
        ({"SLURM_PROCID": "1"}, ["SLURM_PROCID=1", "SLURM_STEP_ID=''", "srun"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID='x'"]),
        (SLURM_ALONE | {"PMI_RANK": "1", "PMI_SIZE": "4"}, ["PMI_RANK=1", "PMI_SIZE=4"]),
    ],
)
def test_half_or_garbled_environments_name_the_variable(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LauncherEnvironmentError) as caught:
        detect(environ)
    for text in named:
        assert text in str(caught.value)


def test_what_a_batch_script_exports_are_hints_in_its_steps() -> None:
    reading = detect(SLURM | {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (reading.launcher, str(reading.host), str(reading.port)) == (
        "slurm",
        "10.0.0.1 (from MASTER_ADDR)",
        "1234 (from MASTER_PORT)",
    )


def test_hand_set_variables_are_completed_by_a_launcher_that_agrees() -> None:
    reading = detect(SLURM | {"RANK": "1", "WORLD_SIZE": "2"})
    assert str(reading.rank) == "1 (from RANK)"
    assert str(reading.local_rank) == "0 (from SLURM_LOCALID)"
    assert str(reading.num_nodes) == "2 (from SLURM_STEP_NUM_NODES)"


def test_hand_set_variables_are_not_completed_by_one_that_does_not() -> None:
    reading = detect(SLURM | {"RANK": "0", "WORLD_SIZE": "2"})
    assert reading.local_rank is None
    assert "SLURM_PROCID=1" in reading.warnings[0]
    assert detect(SLURM | {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}).local_world_size is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "prefix it with srun"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}, "start it with torchrun"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is set, as in ranks of torchrun"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, "TORCHELASTIC_RESTART_COUNT=0 is set, as in ranks of torchrun"),
        ({"OMPI_COMM_WORLD_NODE_RANK": "1"}, "OMPI_COMM_WORLD_NODE_RANK=1 is set, as in ranks of mpirun"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 is set, as in ranks of srun"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2 is set, as in ranks of srun"),
    ],
)
def test_an_allocation_that_is_not_used_or_a_variable_that_is_left_over_is_a_warning(
    environ: dict[str, str], said: str
) -> None:
    reading = detect(environ)
    assert reading.launcher == "none"
    assert said in reading.warnings[0]


@pytest.mark.parametrize("kind", ["k8s-v1", "k8s-v1.6", "k8s-v2", "k8s-elastic", "k8s-indexed"])
def test_pods_are_not_taken_for_ranks(kind: str) -> None:
    path = Path(__file__).parents[1] / "data" / kind / "default.json"
    for environ in json.loads(path.read_text()).values():
        if kind == "k8s-v1":  # RANK counts pods, and two processes shall run in each
            with pytest.raises(LauncherEnvironmentError, match="counts the pods"):
                detect(environ)
        elif kind == "k8s-v1.6":  # one process a pod: the pods are the ranks
            assert detect(environ).launcher == "plain"
        else:
            assert detect(environ).launcher == "none"


# As `rankwise launch` starts its ranks, in a task of Slurm's.
OURS = SLURM | TORCHRUN | run_variables(SLURM | TORCHRUN)
INNER_PMI = PMI | {"PMI_FD": "7"}


@each_row(
    ("environ", "launcher", "rank"),
    [
        (OURS, "rankwise", 3),
        (OURS | {"TORCHELASTIC_RUN_ID": "other", "RANK": "0"}, "torchrun", 0),
        (OURS | {"MASTER_PORT": "29501", "RANK": "0"}, "torchrun", 0),  # of the same run id, which is a user's
        (OURS | OPENMPI, "openmpi", 5),
        (OURS | INNER_PMI, "mpich", 2),
        (OURS | INNER_PMI | {"I_MPI_HYDRA_UUID": "1"}, "intelmpi", 2),
        (OURS | {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, "slurm", 0),
        (OURS | {"SLURM_PROCID": "0"} | SLURM, "rankwise", 3),
        ({name: value for name, value in OURS.items() if not name.startswith("SLURM_")}, "rankwise", 3),
        (TORCHRUN | OPENMPI | run_variables(TORCHRUN | OPENMPI), "rankwise", 3),  # in a rank of mpirun
        (TORCHRUN | OPENMPI | run_variables(TORCHRUN | OPENMPI) | {"PMIX_NAMESPACE": "inner"}, "openmpi", 5),
        (TORCHRUN | INNER_PMI | run_variables(TORCHRUN), "mpich", 2),
        (TORCHRUN | INNER_PMI | run_variables(TORCHRUN | INNER_PMI), "rankwise", 3),
    ],
)
def test_a_launcher_inside_of_rankwise_launch_is_believed(environ: dict[str, str], launcher: str, rank: int) -> None:
    reading = detect(environ)
    assert (reading.launcher, reading.rank.value) == (launcher, rank)
    if launcher in {"openmpi", "mpich", "intelmpi"}:
        assert (reading.host, reading.port) == (None, None), "where the outer ranks meet"


def test_an_address_that_is_given_to_an_inner_launcher_is_its_own() -> None:
    reading = detect(OURS | OPENMPI | {"MASTER_ADDR": "node7"})
    assert (reading.launcher, str(reading.host), reading.port) == ("openmpi", "node7 (from MASTER_ADDR)", None)
    reading = detect(OURS | OPENMPI | {"MASTER_PORT": "1234"})
    assert (reading.launcher, reading.host, str(reading.port)) == ("openmpi", None, "1234 (from MASTER_PORT)")


def test_ranks_of_rankwise_launch_can_be_read_as_torchruns() -> None:
    assert detect(OURS, "torchrun").launcher == "torchrun"
    with pytest.raises(LauncherEnvironmentError, match="RANKWISE_RUN_ID is not set"):
        detect(TORCHRUN, "rankwise")


@each_row("launcher", [launcher.name for launcher in LAUNCHERS if launcher.name != "none"])
def test_a_launcher_that_is_asked_for_must_be_there(launcher: str) -> None:
    with pytest.raises(LauncherEnvironmentError):
        detect({}, launcher)


def test_none_can_be_asked_for_anywhere() -> None:
    assert detect(TORCHRUN | SLURM, "none").world_size.value == 1


def test_a_misspelled_launcher_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean 'torchrun'"):
        detect({}, "torchrunn")


def test_only_the_argument_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert detect({}).launcher == "none"
    assert detect(PLAIN).rank.value == 1
    assert dict(os.environ) == before


def test_every_launcher_is_listed_where_one_is_chosen() -> None:
    for launcher in LAUNCHERS:
        assert f'"{launcher.name}"' in str(init.__doc__)
        with pytest.raises(InvalidArgumentError, match=f"none of 'auto', .*'{launcher.name}'"):
            detect({}, "nobody")
