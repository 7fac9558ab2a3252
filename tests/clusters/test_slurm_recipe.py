"""docs/recipes/slurm.md: its programs and batch scripts, in a real Slurm, with shorter times."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN
from tests.lanes import variants
from tests.session.worlds import clean_environ

PAGE = (Path(__file__).parents[2] / "docs" / "recipes" / "slurm.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PLAIN, REQUEUED, REQUEUED_BY_SRUN = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.slow


def environ(cluster: dict[str, str]) -> dict[str, str]:
    """Return the environment for a job: the names of this cluster's nodes do not resolve."""
    return clean_environ(**cluster, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", MASTER_ADDR="127.0.0.1")


def run(cluster: dict[str, str], folder: Path, *command: str) -> str:
    ended = subprocess.run(
        command, env=environ(cluster), cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def until(condition: Callable[[], bool], shown: Callable[[], str]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.1)


def without_gpus(script: str) -> str:
    """Return a batch script for the nodes of this cluster, which have no GPUs."""
    return re.sub(r" --gpus-per-node=4|#SBATCH --gpus.*\n", "", script)


@pytest.mark.rare
def test_the_batch_script(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(without_gpus(PLAIN))
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "import rankwise as rw\n"
        "with rw.init(timeout=100):\n"
        "    told = rw.all_gather((rw.topology().node_rank, rw.get_local_rank(), os.environ['OMP_NUM_THREADS']))\n"
        "    if rw.is_rank_zero():\n"
        "        print(sys.argv[1:], told)\n"
    )
    sizes = ("--ntasks-per-node=2", "--cpus-per-task=1", "--output=out")
    run(cluster, tmp_path, "sbatch", "--wait", *sizes, "job.sh")
    places = [(node, local, "1") for node in range(2) for local in range(2)]
    assert (tmp_path / "out").read_text().splitlines()[-1] == f"['--lr', '0.1'] {places}"


@pytest.mark.parametrize("script", variants([REQUEUED, REQUEUED_BY_SRUN], slow=[REQUEUED]), ids=["launch", "srun"])
def test_the_batch_script_that_requeues_itself(cluster: dict[str, str], script: str, tmp_path: Path) -> None:
    """It gets the signal of its limit from here; the second start ends by itself."""
    script = without_gpus(script).replace("-n 4", "-n 2").replace("1000000", "$((SLURM_RESTART_COUNT ? 1 : 1000000))")
    script = script.replace("ntasks-per-node=4", "ntasks-per-node=1").replace("cpus-per-task=8", "cpus-per-task=1")
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(PROGRAM)

    def printed() -> str:
        return (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""

    job = run(cluster, tmp_path, "sbatch", "--parsable", "--output=out", "job.sh").strip()
    until(lambda: "start 0, from step 1" in printed(), printed)
    run(cluster, tmp_path, "scancel", "--batch", "--signal=USR1", job)
    until(lambda: "finished" in printed(), printed)
    until(lambda: not run(cluster, tmp_path, "squeue", "--noheader"), printed)
    assert int(re.findall(r"start 1, from step (\d+)", printed())[-1]) > 1


@pytest.mark.rare
def test_a_submitted_script_runs_again_after_the_signal(cluster: dict[str, str], tmp_path: Path) -> None:
    """A rank that exits with an error is not finished, one that returns is: the second start returns at once."""
    program = PROGRAM.replace("int(sys.argv[1])", "(1 if rw.restart_count() else int(sys.argv[1]))")
    (tmp_path / "train.py").write_text(program)
    (command,) = re.findall(r"\$ rankwise (submit .*)\n", PAGE)
    command = command.replace("--nproc-per-node 4 --gpus-per-task 1", "--nproc-per-node 1").replace("4:00:00", "5")
    job = run(cluster, tmp_path, str(BIN / "rankwise"), *command.split()).partition(":")[0].removeprefix("job ")

    def printed() -> str:
        files = [path for suffix in ("out", "err") for path in tmp_path.glob(f"rankwise-jobs/**/*.{suffix}")]
        return "".join(path.read_text() for path in files)

    until(lambda: "start 0, from step 1" in printed(), printed)
    run(cluster, tmp_path, "scancel", "--signal=USR2", job)
    until(lambda: "finished" in printed(), printed)
    until(lambda: not run(cluster, tmp_path, "squeue", "--noheader"), printed)
    assert re.search(r"start 1, from step (?!1\b)\d+", printed())
