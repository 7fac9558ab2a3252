"""The example, on real data: accurate, and the same for any number of ranks, under any launcher."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")

RUNS = {
    "alone": [sys.executable, DIGITS],
    "rankwise launch, 4": [str(BIN / "rankwise"), "launch", "-n", "4", DIGITS],
    "torchrun, 2, DDP": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", DIGITS, "--ddp"],
    "mpiexec, 2": [str(BIN / "mpiexec.hydra"), "-n", "2", sys.executable, DIGITS],
}
LAUNCHERS = {"alone": "none", "rankwise launch": "rankwise", "torchrun": "torchrun", "mpiexec": "mpich"}


NAMES = [["torchrun, 2, DDP"], [*RUNS]]


@pytest.mark.parametrize("names", variants(NAMES, slow=NAMES[:1]), ids=["one", "all"])
def test_every_way_to_run_it_is_as_accurate(names: list[str], tmp_path: Path) -> None:
    accuracies = {}
    environ = clean_environ(COLUMNS="100", TMPDIR=str(tmp_path))
    for name in names:
        ended = subprocess.run(RUNS[name], env=environ, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr
        row = re.search(r"│ +([0-9]+) │ +(\w+) │ +\w+ │ +([0-9]+) │ +([0-9]+) │", ended.stdout)
        assert row is not None, ended.stdout
        assert row[2] == LAUNCHERS[name.partition(",")[0]]
        ranks, samples, right = int(row[1]), int(row[3]), int(row[4])
        assert (ranks, samples) == (int(re.sub(r"\D", "", name) or 1), 400), "each sample once"
        accuracies[name] = right / samples
    assert min(accuracies.values()) >= 0.97, accuracies
    assert max(accuracies.values()) - min(accuracies.values()) <= 0.005, accuracies
