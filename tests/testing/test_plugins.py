"""The plugin beside others: hooks that come before its own, and values that plugins give to workers of pytest-xdist."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.lanes import variants
from tests.testing.running import PROGRAMS, failure_report, run


@pytest.fixture(autouse=True)
def hooks(programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    shutil.copy(PROGRAMS / "hooks.py", programs.path / "conftest.py")


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param(("-n", "2"), marks=pytest.mark.rare), ("-p", "no:xdist")])
def test_hooks_that_come_first(programs: pytest.Pytester, options: tuple[str, ...]) -> None:
    programs.makeini("[pytest]\naddopts = --strict-markers --strict-config\ntimeout = 100\ntimeout_method = signal")
    result = run(programs, "hooked", *options)
    result.assert_outcomes(passed=8, failed=2, errors=2)
    output = result.stdout.str()
    assert "ranks 0-1 failed: ValueError: refused\n" in output
    assert "ranks 0-1 failed: ValueError: refused again\n" in output
    for test in ("test_reported_late", "test_reported_never"):
        assert "a plugin runs tests in its own way" in failure_report(result, test)


@pytest.mark.parametrize("option", variants(["--setup-plan", "--setup-only"], slow=["--setup-only"]))
def test_options_with_which_no_test_runs(programs: pytest.Pytester, option: str) -> None:
    result = run(programs, "hooked", option, "-k", "body")
    assert result.ret == 0
    assert not (programs.path / "ran").exists()
    assert re.search(r"SETUP +F world\b", result.stdout.str())


@pytest.mark.slow
def test_reruns_run_in_ranks_again(programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-pno:randomly -pno:asyncio")
    result = run(programs, "rerunning", "-rA", "-v")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"], outcomes["errors"], outcomes["rerun"]) == (4, 2, 1, 7)
    assert "ranks 0-1 failed: ValueError: attempt 2" in failure_report(result, "test_fails_always")
    assert "ranks 0-1 failed: ValueError: another one" in failure_report(result, "test_only_of_one_error")
    result.stdout.no_fnmatch_line("*ranks that were replaced*")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param(("-n", "2"), marks=pytest.mark.rare), ("--cov=test_plugged", "--cov-report=term")]
)
def test_plugins_that_many_projects_have(
    programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS")
    programs.makeini(
        "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\naddopts = --strict-markers"
    )
    result = run(programs, "plugged", "--snapshot-update", "--timeout=100", *options)
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["rerun"]) == (15, 2)
    assert "failed" not in outcomes
    assert "errors" not in outcomes
    snapshots = (programs.path / "__snapshots__" / "test_plugged.ambr").read_text()
    assert re.findall(r"# name: (.*)", snapshots) == ["test_syrupy[2ranks]", "test_syrupy[serial]"]
