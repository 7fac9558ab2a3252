"""Debuggers in ranks."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.testing.running import PROGRAMS, failure_report, run


@pytest.mark.slow
def test_a_rank_can_be_debugged_where_output_is_shown(programs: pytest.Pytester) -> None:
    shutil.copy(PROGRAMS / "debugging.py", programs.path / "test_debugging.py")
    typed = b"p 40 + world.rank\nimport time\ntime.sleep(4)\ncontinue\nan answer\n"
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-o", "timeout=3", "test_debugging.py"]
    result = programs.run(*command, stdin=typed, timeout=100)
    result.assert_outcomes(passed=2)
    output = result.stdout.str()
    assert "[1] (Pdb) 41" in output
    assert "[1] a question? " in output
    result.stdout.no_fnmatch_line("*ranks that were replaced*")


@pytest.mark.slow
def test_a_debugger_fails_where_output_is_captured(programs: pytest.Pytester) -> None:
    result = run(programs, "debugging")
    result.assert_outcomes(failed=2)
    output = failure_report(result, "test_a_rank_is_debugged")
    failure = "test_debugging.py:19: a debugger was called while output is captured; run pytest with -s"
    assert output.startswith(f"0 of 2 ranks passed\nrank 1 failed: Failed: {failure}\n{failure}\nrank 0 then failed: ")
    assert "bdb" not in output
    assert "reading from stdin while output is captured!  Consider using `-s`" in failure_report(
        result, "test_a_rank_reads"
    )
