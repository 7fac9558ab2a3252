"""Joining under real launchers: torchrun, Open MPI, MPICH, Slurm. One program, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import variants
from tests.session.worlds import PROGRAMS, clean_environ, free_port

BIN = Path(sys.executable).parent
PYTHON = sys.executable
JOIN = str(PROGRAMS / "join.py")


def run(command: Sequence[str], **variables: str) -> list[dict[str, Any]]:
    """Run a launcher's command and return the output of its ranks, in the order of ranks."""
    with tempfile.TemporaryDirectory(prefix="launcher-") as folder:  # torchrun leaves folders
        environ = clean_environ(**variables, TMPDIR=folder)
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    places = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return sorted(places, key=lambda place: place["rank"])


def check(places: list[dict[str, Any]], size: int) -> None:
    assert [place["rank"] for place in places] == list(range(size))
    assert all(place["gathered"] == list(range(size)) for place in places)
    assert all(place["total"] == place["world_size"] == size for place in places)


@pytest.mark.slow
def test_torchrun() -> None:
    places = run([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=3", JOIN])
    check(places, 3)
    assert [place["local_rank"] for place in places] == [0, 1, 2]


@pytest.mark.slow
def test_torchrun_with_a_store_of_rank_zeros_own() -> None:
    places = run([str(BIN / "torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}", JOIN])
    check(places, 2)


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], fast=["openmpi"]), indirect=True)
def test_mpirun(mpirun: tuple[str, ...]) -> None:
    places = run([*mpirun, "-n", "2", PYTHON, JOIN])
    check(places, 2)
    assert sorted(place["local_rank"] for place in places) == [0, 1], "in whatever order mpirun dealt them out"
    assert all(place["node_rank"] == 0 for place in places)


@pytest.mark.rare
def test_mpichs_other_launcher() -> None:
    """It sets the rank and the number of ranks alone, as Hydra did up to MPICH 3.2."""
    address = ["-genv", "MASTER_ADDR", "localhost", "-genv", "MASTER_PORT", str(free_port())]
    places = run([str(BIN / "mpiexec.gforker"), "-n", "3", *address, PYTHON, JOIN])
    check(places, 3)
    assert sorted(place["local_rank"] for place in places) == [0, 1, 2]


@pytest.mark.parametrize("mpirun", variants(["openmpi", "mpich"], slow=["openmpi"]), indirect=True)
def test_launchers_inside_of_a_rank_of_rankwise_launch(mpirun: tuple[str, ...], tmp_path: Path) -> None:
    """The innermost is the one that is believed, although its ranks have the variables of both."""
    # Each process writes a file of its own: a launcher may mix what its ranks write.
    show = ["sh", "-c", f'{BIN / "rankwise"} env --json > "$(mktemp -p "$SHOWN")"']
    torchrun = [str(BIN / "torchrun"), "--no-python", "--standalone", "--nproc-per-node=2", *show]
    script = tmp_path / "start.py"
    script.write_text(
        "import json, os, subprocess, sys\n"
        "for number, command in enumerate(json.loads(sys.argv[1])):\n"
        "    os.environ['SHOWN'] = f'{sys.argv[2]}/{number}'\n"
        "    os.mkdir(os.environ['SHOWN'])\n"
        "    subprocess.run(command, timeout=200, check=True)\n"
    )
    commands = [show, torchrun, [*mpirun, "-n", "2", *show]]
    subprocess.run(
        [str(BIN / "rankwise"), "launch", "-n", "1", str(script), json.dumps(commands), str(tmp_path)],
        env=clean_environ(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = []
    for number in range(len(commands)):
        readings = [json.loads(path.read_text()) for path in (tmp_path / str(number)).iterdir()]
        facts = [reading["facts"] for reading in readings]
        ranks = sorted((fact["rank"]["value"], fact["world_size"]["value"]) for fact in facts)
        found.append(({reading["launcher"] for reading in readings}, ranks))
    inner = "mpich" if len(mpirun) == 1 else "openmpi"
    both = [(0, 2), (1, 2)]
    assert found == [({"rankwise"}, [(0, 1)]), ({"torchrun"}, both), ({inner}, both)]


@pytest.mark.rare
def test_mpirun_of_shells(mpirun: tuple[str, ...]) -> None:
    """Ranks wrapped in shells have other parents, and still meet."""
    check(run([*mpirun, "-n", "2", "sh", "-c", f"true; {PYTHON} {JOIN}; true"]), 2)


@pytest.mark.rare
def test_two_mpiruns_side_by_side_do_not_meet(mpirun: tuple[str, ...]) -> None:
    both = [
        subprocess.Popen([*mpirun, "-n", "2", PYTHON, JOIN], env=clean_environ(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in both:
            out, _ = process.communicate(timeout=200)
            places = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            check(sorted(places, key=lambda place: place["rank"]), 2)
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.rare
def test_srun_on_one_node(cluster: dict[str, str]) -> None:
    places = run(["srun", "-N1", "-n3", PYTHON, JOIN], **cluster)
    check(places, 3)
    assert all(place["num_nodes"] == 1 for place in places)


@pytest.mark.slow
def test_srun_on_two_uneven_nodes(cluster: dict[str, str]) -> None:
    command = ["srun", "-N2", "-n3", "--export=ALL,MASTER_ADDR=127.0.0.1", PYTHON, JOIN]
    places = run(command, **cluster)
    check(places, 3)
    assert [(place["node_rank"], place["local_rank"], place["local_world_size"]) for place in places] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 1),
    ]


@pytest.mark.slow
def test_two_steps_of_one_job_do_not_meet(cluster: dict[str, str]) -> None:
    step = f"srun --exact -N1 -n2 {PYTHON} {JOIN}"
    ended = subprocess.run(
        ["salloc", "-Q", "-N1", "-n4", "sh", "-c", f"{step} & {step} & wait"],
        env=clean_environ(**cluster),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    places = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [place["world_size"] for place in places] == [2] * 4, ended.stderr


@pytest.mark.slow
def test_a_batch_shell_is_alone(cluster: dict[str, str]) -> None:
    ended = subprocess.run(
        ["salloc", "-Q", "-N1", "-n3", str(BIN / "rankwise"), "env", "--json"],
        env=clean_environ(**cluster),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    shown = json.loads(ended.stdout)
    (warning,) = shown["warnings"]
    assert (shown["launcher"], ended.stderr) == ("none", "")
    assert "has 3 tasks, but this process runs alone: prefix it with srun" in warning


@pytest.mark.slow
def test_torchrun_inside_srun(cluster: dict[str, str]) -> None:
    places = run(["srun", "-N1", "-n1", str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", JOIN], **cluster)
    check(places, 2)
