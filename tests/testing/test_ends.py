"""How tests in ranks end: late, with errors, with fixtures that outlive them; and the state for the next tests."""

from __future__ import annotations

import pytest

from tests.testing.running import failure_report, run


@pytest.mark.slow
def test_what_happens_at_the_end_is_told(programs: pytest.Pytester) -> None:
    result = run(programs, "ending")
    result.assert_outcomes(passed=4, failed=1, xfailed=1, errors=1)
    output = failure_report(result, "test_one_exits_when_the_other_has_failed")
    assert output.startswith("0 of 2 ranks passed\nrank 1 failed: ValueError: no data\n")
    assert output.endswith("rank 0 ended with exit code 7")
    output = failure_report(result, "test_leaves_something")
    assert "rank 0 ended with exit code 3 while it tore down its fixtures of wider scope" in output


@pytest.mark.slow
def test_a_run_that_stops_tells_all(programs: pytest.Pytester) -> None:
    result = run(programs, "mixed", "-x")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    assert "a bad end of the module" in failure_report(result, "test_in_ranks")
    assert "ranks 0-1 failed: ValueError: no data" in result.stdout.str()


@pytest.mark.rare
def test_ranks_that_end_badly_after_a_test_without_ranks_are_told_with_xdist(programs: pytest.Pytester) -> None:
    programs.makeconftest(
        "import os\ndef pytest_sessionfinish():\n    if 'RANK' in os.environ: raise ValueError('a bad end')"
    )
    programs.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_in_ranks(): ...\ndef test_alone(): ...")
    for options, last in ((), "test_in_ranks"), (("-n", "1"), "test_alone"):
        result = programs.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=150)
        result.assert_outcomes(passed=2, errors=1)
        assert "rank 0 failed at its end" in failure_report(result, last)
        assert "rank 1 failed at its end" in failure_report(result, last)


@pytest.mark.rare
def test_a_limit_may_be_longer_than_that_of_the_start(programs: pytest.Pytester) -> None:
    programs.makeconftest("from rankwise.testing._plugin import timeouts\ntimeouts.START_SECONDS = 30")
    programs.makepyfile("import pytest, time\n@pytest.mark.ranks(2, timeout=100)\ndef test_it(): time.sleep(31)")
    programs.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_test_may_come_twice(programs: pytest.Pytester) -> None:
    run(programs, "fresh", "--keep-duplicates", "test_fresh.py").assert_outcomes(passed=4)


@pytest.mark.slow
def test_what_the_next_file_does_is_not_this_ones(programs: pytest.Pytester) -> None:
    (programs.mkdir("files[1]") / "test_d.py").write_text("import pytest\n@pytest.mark.ranks(2)\ndef test_d(): ...")
    programs.makepyfile(
        test_a="""
            import os, pytest
            @pytest.fixture(scope="module", autouse=True)
            def variable():
                os.environ["VARIABLE"] = "1"
                yield
                del os.environ["VARIABLE"]
            @pytest.mark.ranks(2)
            def test_a(): ...
        """,
        test_b="""
            import os, pytest
            if "RANK" in os.environ:
                raise RuntimeError("not on ranks")
            @pytest.mark.ranks(2)
            def test_b(): ...
        """,
        test_c="""
            import os, pytest
            if "RANK" in os.environ:
                pytest.skip("neither on ranks", allow_module_level=True)
            @pytest.mark.ranks(2)
            def test_c(): ...
        """,
    )
    result = programs.runpytest_subprocess("-p", "no:cacheprovider", *(f"test_{name}.py" for name in "abc"), ".")
    result.assert_outcomes(passed=1, errors=3)
    assert "RuntimeError: not on ranks" in failure_report(result, "test_b")
    assert "neither on ranks" in failure_report(result, "test_c")
    assert "cannot contain [] parametrization" in failure_report(result, "test_d")
    result.stdout.no_fnmatch_line("*ranks that were replaced*")
