"""Frameworks that know torchrun run unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

RANKWISE = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2", "--no-prefix"]
PROGRAMS = Path(__file__).parent / "programs"


FRAMEWORKS = [
    ("with_accelerate", "2 [0, 1] MULTI_CPU"),
    ("with_lightning", "2 [0, 1] TorchElasticEnvironment"),
    ("with_ignite", "2 [0, 1] True"),
]


# Another test trains with Ignite: tests/data_loading/test_loops_of_frameworks.py.
@pytest.mark.parametrize(("program", "printed"), variants(FRAMEWORKS, slow=FRAMEWORKS[:2]))
def test_a_framework_runs(program: str, printed: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*RANKWISE, str(PROGRAMS / f"{program}.py")],
        env=clean_environ(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("2 ")] == [printed, printed]
