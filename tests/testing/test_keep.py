"""Sessions of pytest that run in a fork of a launch server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RANKWISE = str(Path(sys.executable).parent / "rankwise")
TESTS = """
import os
import pytest
import torch  # which the project's tests import
import rankwise as rw
import own

@pytest.mark.ranks("serial", 2)
def test_sum(world):
    assert rw.all_reduce(1) == world.world_size
    assert own.VALUE == "VALUE"

def test_process(capfd, monkeypatch):
    print(os.getcwd(), os.environ["OF_CLIENT"])
    assert capfd.readouterr().out.split()[1] == "yes"

@pytest.mark.ranks(2)
def test_that_fails_on_one(world):
    assert world.rank == 0
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OF_CLIENT", "yes")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # a worker stays where it is
    with tempfile.TemporaryDirectory() as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        yield pytester.path
        subprocess.run([RANKWISE, "server", "stop"], check=True, capture_output=True)


def write(folder: Path, value: str) -> None:
    (folder / "own.py").write_text("VALUE = 'VALUE'")
    (folder / "test_it.py").write_text(TESTS.replace('== "VALUE"', f'== "{value}"'))


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-pno:cacheprovider", "--ranks-keep", *options, timeout=150)


@pytest.mark.slow
def test_a_session_after_an_edit_has_the_edited_modules(pytester: pytest.Pytester, folder: Path) -> None:
    write(folder, "VALUE")
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*rank 1*"])
    servers = subprocess.run([RANKWISE, "server", "list"], check=True, capture_output=True, text=True).stdout
    assert servers.count("process ") == 1

    write(folder, "no value")  # of another length, so that its compiled file is not used again
    run(pytester).assert_outcomes(passed=1, failed=3)
    again = subprocess.run([RANKWISE, "server", "list"], check=True, capture_output=True, text=True).stdout
    assert again.split(":")[0] == servers.split(":")[0]

    write(folder, "VALUE")
    run(pytester, "-n2").assert_outcomes(passed=3, failed=1)
    result = run(pytester, "--no-such-option")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_folder_of_others_is_an_error(pytester: pytest.Pytester, folder: Path) -> None:
    sockets = Path(os.environ["XDG_RUNTIME_DIR"], "rankwise")
    sockets.mkdir()
    sockets.chmod(0o777)
    write(folder, "VALUE")
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --ranks-keep: {sockets} is not a folder that only this user may enter *"])
    sockets.rmdir()
