"""Stop under srun, on a real Slurm of four nodes: the signals of scancel reach all ranks, which stop at one step."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.session.worlds import clean_environ
from tests.training.test_stopping_jobs import PROGRAM, SECONDS, check_stop, read_until

pytestmark = pytest.mark.rare


@pytest.mark.soak(7)
def test_a_signal_of_scancel_at_a_random_moment(cluster: dict[str, str], seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)  # noqa: S311 - repeatable
    number = rng.choice((signal.SIGUSR1, signal.SIGUSR2))
    environ = clean_environ(**cluster, MASTER_ADDR="127.0.0.1", TMPDIR=str(tmp_path))
    command = ["srun", "-N2", "--ntasks-per-node=1", f"--job-name={tmp_path.name}", sys.executable, PROGRAM]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            read_until(process, "running")
            time.sleep(rng.random())
            scancel = ["scancel", f"--signal={number.name.removeprefix('SIG')}", f"--name={tmp_path.name}"]
            subprocess.run(scancel, env=environ, check=True, timeout=SECONDS)
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    check_stop(output, size=2, reason=f"rank {0 if 'rank 0 received' in output else 1} received {number.name}")
    assert process.returncode == 0, output
