"""Running pytest on a project in a temporary folder, and reading its output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def run(programs: pytest.Pytester, name: str, *args: str) -> pytest.RunResult:
    shutil.copy(PROGRAMS / f"{name}.py", programs.path / f"test_{name}.py")
    # With Python 3.14, Hypothesis warns about itself.
    options = ["-p", "no:cacheprovider", "-W", "ignore:It looks like `register_random` was passed an object"]
    return programs.runpytest_subprocess(*options, f"test_{name}.py", *args, timeout=150)


def failure_report(result: pytest.RunResult, test: str) -> str:
    """Return the report of a failed test in the output of a run."""
    match = re.search(rf"_+ (ERROR at \w+ of )?{test} _+\n(.*?)\n(_{{5,}} |={{5,}} )", result.stdout.str(), re.DOTALL)
    assert match is not None, result.stdout.str()
    return match[2]
