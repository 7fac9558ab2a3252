"""Ranks of a real Slurm, in every kind of step: each reports the node that it was started on, as slurmd names it."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.hosts import BIN, SHOW, check_topology, topology_of
from tests.clusters.mpi import MPIS, Mpi
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port

pytestmark = pytest.mark.slow

# Rank zero prints the reports of all ranks, and each process first the node that it is on.
PROBE = [
    "sh",
    "-c",
    f'echo "@ ${{RANK:-${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-$SLURM_PROCID}}}}}} $SLURMD_NODENAME"; {" ".join(SHOW)}',
]


def run(command: Sequence[str], cluster: Mapping[str, str], **variables: str) -> str:
    # The nodes are on one machine, and their names do not resolve.
    environ = clean_environ(**cluster, MASTER_ADDR="127.0.0.1", **variables)
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def check(out: str, launcher: str, sizes: Sequence[int]) -> list[str]:
    """Check the reports against the nodes that the processes were on, of these sizes; return the node of each rank."""
    lines = out.splitlines()
    node_of = {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("@")}
    nodes = [node_of[rank] for rank in range(sum(sizes))]
    assert sorted(Counter(nodes).values()) == sorted(sizes)
    ranks: list[dict[str, Any]] = json.loads("\n".join(line for line in lines if not line.startswith("@")))["ranks"]
    assert {one["launcher"] for one in ranks} == {launcher}
    check_topology([topology_of(one) for one in ranks], nodes)
    return nodes


PLACEMENTS = [
    ("-N2 --ntasks-per-node=2", [2, 2]),
    ("-N2 -n3", [2, 1]),
    ("-N4 -n7", [4, 1, 1, 1]),
    ("-N3 -n6 -m plane=2", [1, 1, 4]),
    ("-N1 -n3 -w node2", [3]),
]


@pytest.mark.parametrize(
    ("options", "sizes"),
    variants(PLACEMENTS, slow=PLACEMENTS[3:4]),
    ids=["even", "uneven", "one node full", "plane", "one node"],
)
def test_srun(cluster: dict[str, str], options: str, sizes: list[int]) -> None:
    check(run(["srun", *options.split(), *PROBE], cluster), "slurm", sizes)


def test_tasks_that_are_dealt_out_in_turn(cluster: dict[str, str]) -> None:
    command = ["srun", "-N2", "--ntasks-per-node=2", "-m", "cyclic", *PROBE]
    assert check(run(command, cluster), "slurm", [2, 2]) == ["node0", "node1", "node0", "node1"]


STEPS = [("-N3 -n3", [0, 1, 2]), ("-N1 -n2 -w node1", [1, 1]), ("-N2 -n2 -w node[1-2]", [1, 2])]


@pytest.mark.parametrize(
    ("options", "nodes"),
    variants(STEPS, slow=STEPS[2:]),
    ids=["all nodes", "another node", "other nodes"],
)
def test_a_step_of_a_job(cluster: dict[str, str], options: str, nodes: list[int]) -> None:
    """Its nodes may be some of the job's, whose variables the ranks have too."""
    # Named, since a node that still ends an earlier job would not be chosen.
    command = ["salloc", "-Q", "-N3", "-w", "node[0-2]", "--ntasks-per-node=2", "srun", *options.split(), *PROBE]
    found = check(run(command, cluster), "slurm", list(Counter(nodes).values()))
    assert found == [f"node{node}" for node in nodes]


def test_a_heterogeneous_job(cluster: dict[str, str]) -> None:
    command = ["salloc", "-Q", "-N1", "-n1", ":", "-N2", "--ntasks-per-node=2", "srun", "--het-group=0,1", *PROBE]
    check(run(command, cluster), "slurm", [1, 2, 2])


@pytest.mark.rare
def test_a_batch_script(cluster: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n" + "srun -N2 -n3 " + " ".join(f"'{word}'" for word in PROBE) + "\n")
    run(["sbatch", "--wait", "-N2", "-n3", f"--output={tmp_path / 'out'}", str(script)], cluster)
    check((tmp_path / "out").read_text(), "slurm", [2, 1])


def test_torchrun_on_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    """The tasks of the step are the agents of torchrun, and not its ranks."""
    options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=1", "--no-python"]
    torchrun = [str(BIN / "torchrun"), *options, f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = ["srun", "-N2", "--ntasks-per-node=1", *torchrun, *PROBE]
    check(run(command, cluster, TMPDIR=str(tmp_path)), "torchrun", [2, 2])


@pytest.mark.rare
@pytest.mark.parametrize("mpi", ["openmpi-5", "openmpi-4", "mpich-5", "mpich-4"], indirect=True)
def test_mpi_inside_of_a_job_of_one_node(mpi: Mpi, cluster: dict[str, str]) -> None:
    """Its ranks have the variables of the daemon that it has started through srun."""
    out = run(["salloc", "-Q", "-N1", "-n4", *mpi.command, *mpi.crowded, "-n", "3", *SHOW], cluster)
    ranks = json.loads(out)["ranks"]
    assert {one["launcher"] for one in ranks} == {mpi.name}
    check_topology([topology_of(one) for one in ranks], ["one"] * 3)


@pytest.mark.parametrize("mpi", variants(MPIS, slow={"openmpi-5", "mpich-5"}), indirect=True)
def test_mpi_inside_of_a_job_of_two_nodes(mpi: Mpi, cluster: dict[str, str]) -> None:
    """It starts its daemons through srun."""
    out = run(
        ["salloc", "-Q", "-N2", "--ntasks-per-node=2", *mpi.command, "-n", "4", *PROBE],
        cluster,
        MASTER_PORT=str(free_port()),
    )
    check(out, mpi.name, [2, 2])
