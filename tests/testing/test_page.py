"""The examples of docs/testing.md, run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
MODULE, TESTS, *REST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_example_runs(programs: pytest.Pytester) -> None:
    programs.makepyfile(metrics=MODULE, test_metrics=TESTS)
    result = programs.runpytest_subprocess("-p", "no:cacheprovider", timeout=100)
    result.assert_outcomes(passed=11)
    result.stdout.no_fnmatch_line("*ranks that were replaced*")


@pytest.mark.parametrize("code", REST)
def test_code_runs(code: str) -> None:
    exec(code, {"__name__": "page"})  # noqa: S102 - which is the point
