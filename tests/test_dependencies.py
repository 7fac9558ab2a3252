"""An interpreter without torch: all packages of this one but torch, by links."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rankwise as rw
from tests.session.worlds import clean_environ, free_port

COMMAND = "from rankwise.cli.main import main; main()"


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds no torch."""
    site = tmp_path_factory.mktemp("site")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name.partition("-")[0] not in {"torch", "torchgen", "functorch"} and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    return clean_environ(PYTHONPATH=os.pathsep.join([str(site), str(Path(rw.__file__).parents[1])]))


def run(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    # -S, so that the interpreter's own packages are not found.
    command = [sys.executable, "-S", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    "call",
    [
        "rw.init()",
        "rw.all_reduce(1)",
        "rw.device()",
        "rw.launch(print, nproc=2)",
        "rw.Group",
        "from rankwise._session.current import current_session as s; s().comm",
    ],
)
def test_what_needs_torch_names_it(without_torch: dict[str, str], call: str) -> None:
    ended = run(without_torch, "-c", f"import rankwise as rw; rw.topology(); {call}")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("rankwise.errors.MissingDependencyError: "), ended.stderr
    assert f"needs PyTorch, but {sys.executable} has no package 'torch'" in last
    assert "pip install torch" in last
    assert ended.stderr.count("Traceback") == 1


def test_what_needs_torch_raises_an_import_error(without_torch: dict[str, str]) -> None:
    program = "try:\n    from rankwise import init\nexcept ImportError as error:\n    print(error.name)"
    assert run(without_torch, "-c", program).stdout == "torch\n"


@pytest.mark.parametrize("number", ["2", "auto"])
def test_the_command_says_so_in_a_line(without_torch: dict[str, str], number: str) -> None:
    ended = run(without_torch, "-c", COMMAND, "launch", "-n", number, __file__)
    assert ended.returncode == 1
    assert "needs PyTorch" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_the_command_shows_the_environment_without_torch(without_torch: dict[str, str]) -> None:
    ended = run(without_torch, "-c", COMMAND, "env")
    assert ended.returncode == 0, ended.stderr
    assert "not installed: python -m pip install torch" in ended.stdout
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    one = without_torch | address | {"RANK": "0", "WORLD_SIZE": "1"}
    assert run(one, "-c", COMMAND, "env", "--all").returncode == 0
    agents = (
        one
        | {"WORLD_SIZE": "2"}
        | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    ended = run(agents, "-c", COMMAND, "env", "--all")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
    assert "needs PyTorch" in ended.stderr


@pytest.mark.slow
def test_the_plugin_says_so_in_a_line(without_torch: dict[str, str]) -> None:
    program = str(Path(__file__).parent / "testing" / "programs" / "needs_torch.py")
    pytest_alone = ("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", program)
    ended = run(without_torch, *pytest_alone)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: a test that runs in ranks needs PyTorch" in ended.stderr, ended.stdout
    assert "INTERNALERROR" not in ended.stdout + ended.stderr
    with_xdist = run(without_torch, *pytest_alone, "-n", "1", "-k", "in_ranks or without_a_world")
    assert "\na test that runs in ranks needs PyTorch" in with_xdist.stdout
    assert "1 passed, 1 error" in with_xdist.stdout
    alone = run(without_torch, *pytest_alone, "-k", "alone")
    assert "MissingDependencyError: the fixture `session` (or `world`) needs PyTorch" in alone.stdout
    assert "1 passed, 1 deselected, 1 error" in alone.stdout


@pytest.mark.slow
def test_without_posix_a_process_alone_works_and_the_rest_is_one_sentence() -> None:
    """As on Windows."""
    program = Path(__file__).parent / "session" / "programs" / "without_posix.py"
    ended = subprocess.run(
        [sys.executable, str(program)],
        env=clean_environ(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_PLUGINS="rankwise.testing.plugin"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    getters, stop, alone, *errors, tests_alone, tests_in_ranks = ended.stdout.splitlines()
    assert getters == "0 1 True 1"
    assert stop == "stop False"
    assert alone == "[1.0, 1.0] [{'a': 1}] x 1"
    needs = " needs a POSIX system, such as Linux or macOS; on win32, getters and a world of one work"
    parts = ("a world of several ranks", "rankwise.launch", "rankwise.launching", "rankwise.extend.engines")
    commands = ("rankwise doctor", "rankwise logs")
    assert errors == [*(part + needs for part in parts), *(f"rankwise: {command}{needs}" for command in commands)]
    assert tests_alone.startswith("2 passed, 1 deselected")
    assert tests_in_ranks == "ERROR: a test that runs in ranks" + needs
    assert ended.stderr == ""
