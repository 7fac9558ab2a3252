"""The command, as a user types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import psutil
import pytest
import torch
from click.testing import CliRunner

import rankwise as rw
from rankwise.cli.launch_command import launch
from rankwise.cli.main import main
from tests.lanes import variants
from tests.session.worlds import clean_environ
from tests.tables import each_row

PROGRAMS = Path(__file__).parents[1] / "launch" / "programs"
RANKWISE = str(Path(sys.executable).with_name("rankwise"))


def rankwise(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RANKWISE, *args], env=clean_environ(**variables), capture_output=True, text=True, timeout=200, check=False
    )


def test_launch_runs_a_script_with_its_arguments() -> None:
    argv = ["--lr", "0.1", "-n", "$HOME", "${local_rank}"]
    ended = rankwise("launch", "-n", "2", "--no-prefix", str(PROGRAMS / "train.py"), *argv)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    ranks, gathered = json.loads(ended.stdout)
    assert ranks == [0, 1]
    assert gathered == [{"argv": argv, "name": "__main__", "threads": "1"}] * 2


@pytest.mark.slow
def test_launch_runs_a_module_whatever_place_it_has_itself_and_leaves_no_files(tmp_path: Path) -> None:
    place = {"RANK": "5", "WORLD_SIZE": "6", "RANKWISE_RANK": "0", "RANKWISE_WORLD_SIZE": "1"}
    module = ("-m", "tests.launch.programs.train")
    ended = rankwise("launch", "-n", "2", "--no-prefix", *module, "--lr", "0.1", TMPDIR=str(tmp_path), **place)
    assert ended.returncode == 0, ended.stderr
    ranks, gathered = json.loads(ended.stdout)
    assert ranks == [0, 1]
    assert gathered[0]["argv"] == ["--lr", "0.1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "raised ValueError"),
        pytest.param("3", 3, "ended with exit code 3", marks=pytest.mark.rare),
        pytest.param("kill", 137, "was killed by SIGKILL (out of memory?)", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_world_and_is_named(how: str, status: int, said: str) -> None:
    """Rule 8: the first failure in time, and not that of a rank that waits for the one that failed."""
    ended = rankwise("launch", "-n", "2", str(PROGRAMS / "fail.py"), how)
    assert ended.returncode == status
    assert f"rankwise: rank 1 of 2 on {socket.gethostname()} {said}" in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == (how == "raise"), "the cause's alone"
    if how == "raise":
        assert "rank 1 of 2 leaves with ValueError: the loss is not a number (fail.py:12)" in ended.stderr


@pytest.mark.slow
def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    script = tmp_path / "same.py"
    lines = [
        "import sys",
        "import rankwise as rw",
        "with rw.init():",
        "    if sys.argv[1:]: raise ValueError('negative')",
    ]
    script.write_text("\n".join([*lines, "    rw.all_gather(1) if rw.get_rank() else rw.barrier()"]))
    own = rankwise("launch", "-n", "3", str(script), "raise").stderr
    assert len(re.findall("^rankwise: rank . of 3 leaves with ValueError: negative", own, re.MULTILINE)) == 1
    assert own.count("ValueError: negative") == 3, "the line as it happens, the report, and its traceback"
    assert re.search(r"^ranks ., . then raised the same ValueError|^ranks .-. then raised the same", own, re.MULTILINE)
    shared = rankwise("launch", "-n", "3", str(script)).stderr
    assert "leaves with" not in shared, "all have the error"
    assert shared.count("the calls of the ranks differ") == 2


MISUSES = [
    (["launch", "-n", "2", "missing.py"], "script 'missing.py' does not exist"),
    (["launch", "-n", "0", "x.py"], "nproc=0"),
    (["launch", "-n", "-1", "x.py"], "nproc=-1"),
    (["launch", "-n", "1000000", str(PROGRAMS / "train.py")], "nproc=1000000"),
    (["launch", "-n", "x", "x.py"], "'x' is not a number, nor one of auto, cpu, gpu"),
    (["launch", "x.py"], "script 'x.py' does not exist"),
    (["launch", "-n", "2", "-m", "nosuch.module"], "module 'nosuch.module' is not found"),
    (["launch", "-n", "2", "-m", "json.nosuch"], "module 'json.nosuch' is not found"),
    (["launch", "-n", "2", "-m", "json.tool.py"], "did you mean -m json.tool?"),
    (["launch", "-n", "2", "-m", "email"], "module 'email' is a package, and has no __main__.py"),
    (["launch", "-n", "2"], "Missing argument 'TARGET'"),
    (["launch", "-n", "2", "--max-restart", "1", "x.py"], "--max-restarts"),
    (["launch", "-n", "2", "--nnodes", "2", str(PROGRAMS / "train.py")], "--nnodes=2 needs --master-addr"),
    (
        ["launch", "-n", "2", "--nnodes", "3:2", str(PROGRAMS / "train.py")],
        "'3:2' is neither a number of hosts nor MIN:MAX",
    ),
    (["launch", "-n", "2", "--no-python", "--module", "x"], "--module and --no-python exclude each other"),
    (["launch", "-n", "2", "--no-python", "missing-program"], "program 'missing-program' is not found"),
    (["launch", "-n", "2", "--show", "0-x", "x.py"], "'0-x' is not a list of ranks"),
    (["launch", "-n", "2", "--show", "3-1", "x.py"], "'3-1' is an empty range of ranks"),
    (
        ["launch", "-n", "2", "--show", "0,5", "x.py"],
        "show names rank 5, and of 2 ranks, which are counted from 0, the last is 1",
    ),
    (["launch", "-np", "2", "x.py"], "-np is an option of mpirun: rankwise launch has -n, as in -n 2"),
    (["launch", "-n", "2", "python3", "x.py"], "leave it out, rankwise starts Python itself"),
    (["launch", "-n", "2", "--grace", "inf", "x.py"], "inf is not in the range"),
    (["launch", "-n", "2", str(PROGRAMS)], "is a directory"),
    (["env", "--launcher", "slrum"], "did you mean 'slurm'"),
    (["lunch"], "No such command"),
]


@pytest.fixture
def handles_interrupts() -> Iterator[None]:
    """Give SIGINT its handler back, which the command ignores at its end."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("handles_interrupts")
@each_row(("args", "said"), MISUSES)
def test_misuse_is_one_clear_error(args: list[str], said: str) -> None:
    ended = CliRunner().invoke(main, args)
    assert ended.exit_code == 2
    assert said in ended.stderr


def test_misuse_is_an_exit_status() -> None:
    ended = rankwise("launch", "-n", "2", "missing.py")
    assert ended.returncode == 2
    assert "script 'missing.py' does not exist" in ended.stderr
    assert "Traceback" not in ended.stderr


NOTES = [
    (
        ["script.py", "-n", "4"],
        "rankwise: -n after script.py is an argument of the script; as an option of rankwise,",
    ),
    (["-n", "1", "script.py", "-n", "4"], ""),  # the order was known
    (["script.py", "--nproc-per-node=4"], "rankwise: --nproc-per-node=4 after script.py is an argument of the script"),
    (["script.py", "--lr", "4"], ""),
]


@pytest.mark.parametrize(("args", "note"), variants(NOTES, fast=NOTES[:2], slow=[]))
def test_an_option_after_the_script_is_pointed_out(args: list[str], note: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])")
    ended = rankwise("launch", *(str(script) if arg == "script.py" else arg for arg in args))
    assert ended.stdout.strip().endswith(str(args[args.index("script.py") + 1 :]))
    assert ended.stderr.replace(f"{tmp_path}/", "").startswith(note)
    assert bool(ended.stderr) == bool(note)


def test_a_program_that_cannot_be_executed_is_status_126(tmp_path: Path) -> None:
    program = tmp_path / "bad.py"
    program.write_text("print(1)\n")
    ended = rankwise("launch", "-n", "2", "--no-python", str(program))
    assert ended.returncode == 126
    assert f"program {str(program)!r} cannot be executed (permission denied): chmod +x" in ended.stderr
    assert rankwise("launch", "--no-python", str(tmp_path)).returncode == 126


def test_the_help_of_launch_is_in_groups_of_lines() -> None:
    helped = rankwise("launch", "--help", COLUMNS="80").stdout
    headings = ["Ranks", "Output", "Failures", "Debugging", "Several hosts", "Help", "Examples"]
    assert [line[:-1] for line in helped.splitlines() if line.endswith(":") and line[0] != " "] == headings
    options = helped.partition("\nRanks:\n")[2].partition("\nExamples:\n")[0]
    # Each is one line: the options of a group begin in one column, and so do the texts.
    assert all(line.startswith("  -") or line.endswith(":") for line in options.splitlines() if line)
    assert max(map(len, helped.splitlines())) <= 80
    assert "_" not in options


def test_each_command_has_an_example() -> None:
    for name in main.commands:
        assert re.search(rf"Examples?:\s+(srun [-=\w\s]+)?rankwise\s+{name}", rankwise(name, "--help").stdout), name


def test_all_options_are_in_the_longer_help() -> None:
    helped = rankwise("launch", "--help-all", COLUMNS="200").stdout
    shown = {
        name
        for option in launch.params
        if isinstance(option, click.Option) and not option.hidden
        for name in option.opts
    }
    assert shown <= set(re.split(r"[\s,]+", helped))


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["launch", "--help"],
        ["env", "--plain"],
        ["env", "--json"],
        ["env", "--rich"],
        ["ps"],
        ["top", "--interval", "0.1", "--updates", "1"],
        ["submit", "--dry-run", str(PROGRAMS / "train.py")],
    ],
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [RANKWISE, *args],
            env=clean_environ(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("rankwise: the output could not be written: ")


def test_a_working_directory_that_was_deleted_is_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shell = ["sh", "-c", 'mkdir "$0"; cd "$0"; rmdir "$0"; exec "$@"', str(gone)]
    script = tmp_path / "script.py"
    script.write_text("import rankwise; rankwise.launch(print, nproc=1)")
    for command, tracebacks in (
        ([RANKWISE, "launch", "nosuch.py"], 0),
        ([RANKWISE, "launch", str(script)], 0),
        ([sys.executable, "-m", "rankwise.compat.torch_launch", "nosuch.py"], 0),
        # Of the call alone, and its cause. Not with -c, with which Python 3.13.0 cannot import socket there.
        ([sys.executable, str(script)], 2),
    ):
        ended = subprocess.run(
            [*shell, *command], env=clean_environ(), capture_output=True, text=True, timeout=200, check=False
        )
        assert ended.returncode == 1, ended.stderr
        last = ended.stderr.splitlines()[-1]
        assert "the working directory was deleted, and ranks that start in it cannot load torch" in last
        assert ended.stderr.count("Traceback") == tracebacks


@pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="this host has a GPU")
def test_a_rank_for_each_gpu_needs_one() -> None:
    ended = CliRunner().invoke(main, ["launch", "-n", "gpu", "x.py"])
    assert ended.exit_code == 2
    assert "sees no GPU on this host" in ended.stderr


def test_the_package_is_the_command() -> None:
    version = rankwise("--version").stdout
    assert version == f"rankwise, version {metadata.version('rankwise')}\n"
    ended = subprocess.run([sys.executable, "-m", "rankwise", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == version
    helped = subprocess.run([sys.executable, "-m", "rankwise", "env", "-h"], capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("Usage: rankwise env [OPTIONS]\n")


def test_the_version_of_a_copied_package_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(vars(rw), "__version__", raising=False)
    monkeypatch.setattr(metadata, "version", not_found)
    ended = CliRunner().invoke(main, ["--version"])
    assert ended.exit_code == 1
    assert re.fullmatch(r"Error: rankwise.__version__ is not known: the package was copied to .*\n", ended.output)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("la", "launch"), ("launch --max-r", "--max-restarts"), ("launch -n 2 tra", "train.py"), ("env --j", "--json")],
)
def test_bash_completes_commands_options_and_files(typed: str, completed: str, tmp_path: Path) -> None:
    """In bash itself, by the line that the help shows."""
    (tmp_path / "train.py").touch()
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash")
    program = (
        # "compopt -o default", which bash takes from the line editor alone, completes names of files.
        'compopt() { COMPREPLY+=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")); };'
        'eval "$(_RANKWISE_COMPLETE=bash_source rankwise)"; COMP_WORDS=(rankwise "$@"); COMP_CWORD=$#;'
        '_rankwise_completion rankwise; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        [shell, "-c", program, "bash", *typed.split()],
        env=clean_environ(PATH=f"{Path(RANKWISE).parent}{os.pathsep}{os.environ['PATH']}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert completed in ended.stdout.split(), ended.stderr


@pytest.mark.parametrize("number", variants([signal.SIGTERM, signal.SIGINT], slow=[signal.SIGINT]))
def test_a_signal_to_the_launcher_ends_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time\nprint('up')\ntime.sleep(60)\n")
    launcher = subprocess.Popen(
        [RANKWISE, "launch", "-n", "2", str(script)],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert launcher.stdout is not None
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=200)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 128 + number
    assert "/rankwise/" not in err, "what ranks print of their own interrupt is theirs"
    deadline = time.monotonic() + 200
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


@pytest.mark.parametrize("tool", variants(["cProfile", "coverage"], slow={"cProfile"}))
def test_what_observes_the_launcher_writes_its_results(tool: str, tmp_path: Path) -> None:
    """At the end of the program, or in a function that runs at exit. The exit status is that of the launch."""
    (tmp_path / "fails.py").write_text(
        "import os, pathlib, sys, time\n"
        "print('ran', flush=True)\n"
        "pathlib.Path('rank ' + os.environ['RANK']).touch()\n"
        "while len(list(pathlib.Path().glob('rank *'))) < 2: time.sleep(0.01)\n"  # a failure ends the other
        "sys.exit(7)\n"
    )
    observe = (
        ["-m", "cProfile", "-o", "result"] if tool == "cProfile" else ["-m", "coverage", "run", "--data-file=result"]
    )
    command = [sys.executable, *observe, "-m", "rankwise", "launch", "-n", "2", "fails.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 7, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] ran", "[1] ran"]
    assert (tmp_path / "result").stat().st_size > 1000
