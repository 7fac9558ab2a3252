"""The plugin, as its users run it: pytest in a process of its own, on tests that pass, fail, stop, skip and leak."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import psutil
import pytest
from coverage import CoverageData

from tests.testing.running import PROGRAMS, failure_report, run


@pytest.mark.slow
def test_worlds_that_pass_or_skip_and_markers_that_cannot_be_used(programs: pytest.Pytester) -> None:
    """In one run, since most of each would be its start."""
    for name in ("skipping", "settings"):
        shutil.copy(PROGRAMS / f"{name}.py", programs.path / f"test_{name}.py")
    files = ("test_skipping.py", "test_settings.py")
    result = run(programs, "passing", *files, "-W", "error", "--strict-markers", "-rsxX")
    result.assert_outcomes(passed=31, skipped=4, xfailed=3, xpassed=1, errors=12)
    result.stdout.no_fnmatch_line("*ranks that were replaced*")
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * by a marker",
            "SKIPPED * on all",
            "SKIPPED * on one (rank 1 of 3)",
            "SKIPPED * in a fixture (rank 2 of 3)",
            "XFAIL *test_expected_on_one_rank - known",
        ],
        consecutive=False,
    )
    told = result.stdout.str()
    for text in (
        'ranks needs sizes: numbers of ranks, or "serial"',
        'takes numbers of ranks from 1 to 256, or "serial", got 0',
        """takes numbers of ranks from 1 to 256, or "serial", got 'four'""",
        "has the same size twice",
        "does not take time; it takes backend, timeout and device",
        "needs a timeout in seconds above 0, got 0",
        "ranks(1, 2) cannot make several tests of this one: it is a method of unittest.TestCase",
        "device='nowhere' is no device",
        "backend='none': 'none' is not in this build of torch",
        "device='meta' is not on this host",
    ):
        assert text in told, told


@pytest.mark.slow
def test_worlds_that_fail(programs: pytest.Pytester) -> None:
    result = run(programs, "failing", "--junitxml=report.xml")
    result.assert_outcomes(passed=3, failed=11, errors=3)

    output = failure_report(result, "test_on_one_rank")
    assert output.startswith("3 of 4 ranks passed\nrank 2 failed: AssertionError: this is not for rank two")
    assert "At index 0 diff: 2 != 2" not in output
    assert re.search(r"Captured stdout call \(rank 2\) -+\nwords of rank 2\n", output)
    assert "Captured log call (ranks 0-3)" in output

    output = failure_report(result, "test_on_all_ranks_alike")
    assert output.startswith("0 of 4 ranks passed\nranks 0-3 failed: ValueError: no data")
    assert output.count("raise ValueError") == 1
    assert re.search(r"Captured stdout call \(ranks 0-3\) -+\nwords of all", output)

    output = failure_report(result, "test_on_all_ranks_differently")
    assert all(f"rank {rank} failed: assert {rank} == 17" in output for rank in range(4))
    assert output.count(">       assert") == 1

    for test in ("test_while_others_wait", "test_while_others_wait_in_torch"):
        output = failure_report(result, test)
        assert output.startswith("0 of 4 ranks passed\nrank 1 failed: ValueError: no data"), output
        assert output.count("then failed") >= 1
    assert "ranks 0, 2-3 then failed" in failure_report(result, "test_while_others_wait")

    assert failure_report(result, "test_fixture").startswith(
        "3 of 4 ranks passed\nrank 0 failed: RuntimeError: bad beginning"
    )
    assert "no rank runs the body" not in result.stdout.str()
    assert failure_report(result, "test_end_of_a_fixture").startswith("3 of 4 ranks passed\nrank 3 failed")

    output = failure_report(result, "test_killed")
    assert output.startswith("0 of 4 ranks passed\nrank 1 was killed by SIGKILL")
    assert re.search(r"Captured stdout call \(rank 1\) -+\nlast words of rank 1\n", output)
    output = failure_report(result, "test_crashed")
    assert "rank 1 was killed by SIGSEGV" in output
    assert re.search(r'test_failing.py", line \d+ in test_crashed', output)
    assert "rank 1 ended with exit code 3" in failure_report(result, "test_ended")
    assert "rank 1 failed: SystemExit: 3" in failure_report(result, "test_left")
    assert "the process that ranks are forked from was killed by SIGKILL" in failure_report(
        result, "test_server_killed"
    )
    assert "bad end of the module" in failure_report(result, "test_the_next_one_is_not_poisoned")
    assert "ranks 0-3 [XPASS(strict)]" in failure_report(result, "test_unexpectedly_passed")

    for line in (
        "*::test_on_one_rank - AssertionError: this is not for ra*",
        "*::test_on_all_ranks_differently - assert 0 == 17 (rank *",
        "*::test_while_others_wait - ValueError: no data (rank 1 *",
        "*::test_fixture - RuntimeError: bad beginning (rank 0 of *",
        "*::test_killed - rank 1 was killed by SIGKILL*",
    ):
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*c10d-NullHandler*")
    cases = ET.parse(programs.path / "report.xml").getroot().iter("testcase")  # noqa: S314 - pytest has written it
    assert len({case.get("name") for case in cases}) == 15


@pytest.mark.slow
def test_worlds_that_do_not_end(programs: pytest.Pytester) -> None:
    result = run(programs, "stopped")
    result.assert_outcomes(passed=1, failed=3, errors=1)

    output = failure_report(result, "test_one_sleeps")
    where = r"ranks 0, 2 in all_reduce, test_stopped.py:\d+; rank 1 in sleep, test_stopped.py:\d+"
    assert re.match(rf"0 of 3 ranks passed\ntimeout: not over within 5 s: {where}\n", output), output
    assert re.search(r"stack of rank 1, in sleep.*\n.*\n.*line \d+ in test_one_sleeps\n(?!  File)", output)
    assert "words of rank 1" in output

    output = failure_report(result, "test_one_fails_and_the_others_sleep")
    assert output.startswith("0 of 3 ranks passed\nrank 1 failed: ValueError: no data")
    assert "stopped: not over 2 s after rank 1 had failed: ranks 0, 2 in sleep" in output

    assert "timeout: not over within 5 s: rank 2 in sleep" in failure_report(result, "test_a_fixture_sleeps")
    assert "ranks 0-2 in init_process_group" in failure_report(result, "test_nobody_joins")
    assert not psutil.pid_exists(int((programs.path / "child").read_text()))


@pytest.mark.slow
def test_worlds_that_leak(programs: pytest.Pytester) -> None:
    result = run(programs, "leaking", "-v")
    result.assert_outcomes(passed=14)
    output = result.stdout.str().partition("ranks that were replaced")[2]
    for leak, text in {
        "environment": "environment: LEFT",
        "directory": "working directory: ",
        "stream_closed": "sys.stdout: 'open .* became 'closed ",
        "dtype": "default dtype: ",
        "device": "default device: ",
        "thread": "threads: left",
        "group": "process group: False became True",
        "session": "session: False became True",
        "patch": "changed: time.monotonic",
        "variable": "changed: test_leaking.COUNT",
        "child": "children: ",
        "handler": "handler of signal 10: ",
        "gradients_off": "gradients: True became False",
    }.items():
        assert re.search(rf"test_leaves\[leave_{leak}\]: {text}", output), output
    for rank in range(2):
        assert not psutil.pid_exists(int((programs.path / f"child{rank}").read_text()))


def processes(programs: pytest.Pytester) -> list[list[str]]:
    return [(programs.path / f"processes{rank}").read_text().split() for rank in range(2)]


@pytest.mark.slow
def test_ranks_are_kept_and_may_be_fresh(programs: pytest.Pytester) -> None:
    run(programs, "fresh").assert_outcomes(passed=2)
    assert [len(set(known)) for known in processes(programs)] == [1, 1]
    for rank in range(2):
        (programs.path / f"processes{rank}").unlink()
    run(programs, "fresh", "--ranks-fresh").assert_outcomes(passed=2)
    assert [len(set(known)) for known in processes(programs)] == [2, 2]


@pytest.mark.slow
def test_xdist(programs: pytest.Pytester) -> None:
    shutil.copy(PROGRAMS / "failing.py", programs.path / "test_failing.py")
    result = run(programs, "passing", "-n", "2", "test_failing.py", "-k", "passing or one_rank or fixture")
    result.assert_outcomes(passed=32, failed=1, errors=2)
    assert "rank 2 failed: AssertionError: this is not for rank two" in failure_report(result, "test_on_one_rank")


@pytest.mark.slow
def test_coverage_of_what_only_ranks_run(programs: pytest.Pytester) -> None:
    shutil.copy(PROGRAMS / "covered.py", programs.path)
    options = ("--cov=covered", "--cov-report=term-missing", "--cov-branch", "--cov-context=test")
    result = run(programs, "covering", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["covered.py * 13"])  # the body that nobody runs
    data = CoverageData(basename=str(programs.path / ".coverage"))
    data.read()
    assert data.measured_contexts() == {"test_covering.py::test_ranks|run"}
    data.close()


@pytest.mark.rare
def test_coverage_that_is_not_measured_in_parallel(programs: pytest.Pytester) -> None:
    for name in ("covered", "test_covering"):
        shutil.copy(PROGRAMS / f"{name.removeprefix('test_')}.py", programs.path / f"{name}.py")
    command = ("-m", "coverage", "run", "--branch", "-m", "pytest", "-p", "no:cacheprovider", "test_covering.py")
    programs.run(sys.executable, *command, timeout=100).assert_outcomes(passed=1)
    result = programs.run(sys.executable, "-m", "coverage", "report", "--show-missing", "--include=covered.py")
    result.stdout.fnmatch_lines(["covered.py * 13"])
    assert [path.name for path in programs.path.glob(".coverage*")] == [".coverage"]


@pytest.mark.rare
@pytest.mark.parametrize("command", [("coverage", "run", "-m", "pytest"), ("pytest", "--cov=covered")])
def test_coverage_where_a_rank_is_killed_while_it_writes(programs: pytest.Pytester, command: tuple[str, ...]) -> None:
    for name in ("covered", "saving"):
        shutil.copy(PROGRAMS / f"{name}.py", programs.path / f"{name}.py")
    result = programs.run(sys.executable, "-m", *command, "-p", "no:cacheprovider", "saving.py", timeout=150)
    result.assert_outcomes(passed=1, errors=1)  # the rank that was killed
    result = programs.run(sys.executable, "-m", "coverage", "report", "--show-missing", "--include=covered.py")
    result.stdout.fnmatch_lines(["covered.py * 9, 13"])  # of rank zero
    assert [path.name for path in programs.path.glob(".coverage*")] == [".coverage"]


@pytest.mark.slow
def test_pytest_timeout_ends_a_world(programs: pytest.Pytester) -> None:
    result = run(programs, "slow", "-k", "not interrupted")
    result.assert_outcomes(passed=1, failed=2, errors=1)
    assert "Timeout (>3.0s)" in failure_report(result, "test_ends_ranks_that_end_late")
    for test in ("test_sleeps", "test_sleeps_beside_a_timer"):
        assert re.search(r"Timeout.*3.*: ranks 0-1 in sleep, test_slow.py:\d+", failure_report(result, test))


@pytest.mark.slow
def test_ctrl_c_ends_everything(programs: pytest.Pytester) -> None:
    shutil.copy(PROGRAMS / "slow.py", programs.path / "test_slow.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interrupted", "test_slow.py"]
    with subprocess.Popen(
        command, cwd=programs.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        notes = [programs.path / f"rank{rank}" for rank in range(2)]
        deadline = time.monotonic() + 200
        while not all(note.exists() and note.read_text() for note in notes):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=200)
    place = f"test_slow.py:{len((PROGRAMS / 'slow.py').read_text().splitlines())}"
    assert f"stack of ranks 0-1, in sleep, {place}\n" in output.decode()
    assert f"{place}: KeyboardInterrupt\n" in output.decode()
    _, alive = psutil.wait_procs(started, timeout=100)
    assert not alive


def test_importing_the_plugin_does_not_import_torch(programs: pytest.Pytester) -> None:
    command = [sys.executable, "-c", "import rankwise.testing.plugin, sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
    programs.makepyfile("import sys\ndef test_it():\n    assert 'torch' not in sys.modules")
    programs.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.slow
def test_what_few_tests_do(programs: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "nowhere",
        "MASTER_PORT": "1",
        "RANKWISE_RANK": "1",
        "RANKWISE_WORLD_SIZE": "2",
        "SLURM_PROCID": "1",
        "MASTER_KEY": "a",
        "RANKER_URL": "b",
        "SLURM_CONF": "c",
        "TMPDIR": str(programs.path),
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = run(programs, "unusual", "-rA", "--setup-show", "--log-file=run.log")
    output = result.stdout.str()
    for line in (
        "SUBFAILED*bad*test_a_subtest_fails*",
        "FAILED *::test_a_subtest_fails - contains 2 failed subtests*",
        "FAILED *::test_an_error_cannot_be_printed*",
        "ERROR *::test_begins_what_ends_badly*",
        "SKIPPED * not here (rank 1 of 2)",
        "SUBFAILED*worse*test_a_subtest_fails*",
    ):
        result.stdout.fnmatch_lines([f"*{line}"])
    assert "a bad end of the session" in output
    assert output.count("DeprecationWarning: mind the gap") == 1
    replaced = output.partition("new processes:\n")[2].partition("=====")[0]
    assert re.findall(r"::(test_\w+)", replaced) == ["test_begins_what_ends_badly"], replaced
    result.assert_outcomes(passed=17, failed=5, skipped=1, errors=1, warnings=1)


@pytest.mark.slow
def test_a_rank_ends_the_run(programs: pytest.Pytester) -> None:
    result = run(programs, "exiting", "--junitxml=report.xml")
    assert result.ret == 7
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["!*that is enough*!"])
    assert "called pytest.exit: that is enough" in (programs.path / "report.xml").read_text()
