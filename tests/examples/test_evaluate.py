"""The example of an evaluation: the same digits of every metric for any number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

EVALUATE = str(Path(__file__).parents[2] / "examples" / "evaluate.py")


def metrics(command: list[str], folder: Path) -> list[str]:
    """Run the example, and return the value of each metric as it was printed."""
    environ = clean_environ(TMPDIR=str(folder))
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    return [line.split()[-1] for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("sizes", variants([[2], [1, 3, 4]], slow=[[2]]))
def test_metrics_are_those_of_one_process_to_the_last_digit(sizes: list[int], tmp_path: Path) -> None:
    expected = metrics([sys.executable, EVALUATE], tmp_path)
    assert len(expected) == 3
    assert all(0.1 < float(value) < 1 for value in expected), expected
    rankwise = str(Path(sys.executable).parent / "rankwise")
    for ranks in sizes:
        assert metrics([rankwise, "launch", "-n", str(ranks), EVALUATE], tmp_path) == expected
