"""The output of ranks where pytest captures nothing: whole lines, each with its rank's label."""

from __future__ import annotations

import pytest

from tests.testing.running import run

pytestmark = pytest.mark.slow


def test_output_is_shown_where_it_is_not_captured(programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    result = run(programs, "failing", "-s", "-k", "alike")
    output = [line.removeprefix("test_failing.py ") for line in result.outlines if line.endswith("words of all")]
    assert sorted(output) == [f"[{rank}] words of all" for rank in range(4)]
    assert "Captured stdout" not in result.stdout.str()


def test_lines_are_whole_and_parts_of_lines_are_shown(
    programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # so that Python writes a text and its newline apart
    result = run(programs, "printing", "-s")
    result.assert_outcomes(passed=5)
    for rank in range(3):
        xs = ("x" * (20_000 if number % 50 == 0 else 1) for number in range(100))
        wanted = [f"[{rank}] line {number} of {rank} {x}" for number, x in enumerate(xs)]
        assert [line for line in result.outlines if line.startswith(f"[{rank}] line")] == wanted
        wanted = [f"[{rank}] error {number} of {rank}" for number in range(100)]
        assert [line for line in result.errlines if line.startswith(f"[{rank}] error")] == wanted
    output = result.stdout.str()
    for rank in range(3):
        assert f"\n[{rank}] two lines of {rank}\n" in output
        assert f"\n[{rank}] the second of {rank}\n" in output
    assert "\n[0] is it there? \n[1] another line\n[0] yes\n" in output
    assert "[0] \n[0] done 0%\n[0] done 100%" in result.stderr.str()  # where a carriage return is read as a newline
    assert "[0] unfinished\n" in output
    assert "\nnobody else is here\n" in output
