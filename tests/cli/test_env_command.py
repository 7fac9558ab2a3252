"""`rankwise env` of one process, as a user types it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise.cli.env_report import OWN_VARIABLES
from rankwise.cli.env_tables import launchers_table
from rankwise.extend.launchers import LaunchEnvironment
from tests.session.worlds import clean_environ

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
SECONDS = 200.0
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
INTERACTIVE_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
MPICH_IN_SLURM = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
}
Ended = subprocess.CompletedProcess[str]


def env(*args: str, **variables: str) -> Ended:
    """Run the command to its end."""
    return subprocess.run(
        [RANKWISE, "env", *args],
        env=clean_environ(**variables),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def lines_of(ended: Ended) -> dict[str, list[str]]:
    """Return the words of each line after the first word."""
    assert ended.returncode == 0, ended.stderr
    return {words[0]: words[1:] for words in map(str.split, ended.stdout.splitlines()) if words}


def test_it_names_the_variable_of_each_value() -> None:
    lines = lines_of(env(RANK="3", WORLD_SIZE="4", CUDA_VISIBLE_DEVICES="0,1"))
    assert lines["launcher"] == ["plain", "RANK", "and", "WORLD_SIZE", "are", "set"]
    assert lines["rank"] == ["3", "RANK"]
    assert lines["local_rank"][0] == "-"
    assert lines["CUDA_VISIBLE_DEVICES"][0] == "0,1"
    assert lines["python"][1] == sys.executable
    assert {"nvidia_gpus", "torch", "cuda", "rankwise", "hostname"} <= lines.keys()


def test_it_names_the_address_where_ranks_would_meet() -> None:
    lines = lines_of(env(RANK="3", WORLD_SIZE="4", MASTER_ADDR="node7", MASTER_PORT="1234"))
    assert lines["address"] == ["node7:1234", "MASTER_ADDR", "and", "MASTER_PORT"]
    ended = env(RANK="3", WORLD_SIZE="4")
    assert lines_of(ended)["address"] == ["-", "not", "set"]
    assert "warning: rankwise.init() would raise: the world has 4 (from WORLD_SIZE) ranks" in ended.stdout
    assert "MASTER_ADDR and MASTER_PORT are not set" in ended.stdout


def test_json() -> None:
    found = json.loads(env("--json", RANK="3", WORLD_SIZE="4", RANKWISE_CHECK="1").stdout)
    assert (found["launcher"], found["reason"]) == ("plain", "RANK and WORLD_SIZE are set")
    assert found["facts"]["rank"] == {"value": 3, "source": "RANK"}
    assert found["facts"]["node_rank"] is None
    assert found["rendezvous"]["address"]["value"] is None
    assert found["variables"] == {"RANKWISE_CHECK": {"value": "1", "source": "the environment"}}
    assert found["software"]["torch"]["value"] == torch.__version__
    alone = json.loads(env("--json").stdout)
    assert alone["facts"]["rank"]["value"] == 0
    assert alone["facts"]["world_size"]["value"] == 1
    assert alone["warnings"] == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "3"}, "WORLD_SIZE is not set, but RANK=3 is: set both, or neither to run alone"),
        pytest.param({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number", marks=pytest.mark.slow),
        ({"RANK": "\x1b[2J", "WORLD_SIZE": "2"}, r"RANK='\x1b[2J' is not a whole number"),
        pytest.param({"RANKWISE_CHECK": "yes"}, "RANKWISE_CHECK='yes' is neither 0 nor 1", marks=pytest.mark.slow),
    ],
)
def test_what_init_would_raise_is_the_error(variables: dict[str, str], message: str) -> None:
    for option in ((), ("--json",), ("--all",)):
        ended = env(*option, **variables)
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"rankwise: {message}\n")
    explained = env("--explain", **variables)
    assert (explained.returncode, explained.stderr) == (1, f"rankwise: {message}\n")
    assert "chosen" in explained.stdout


@pytest.mark.parametrize("args", [("--explain", "--all"), ("--launchers", "--explain"), ("--all", "--timeout", "0")])
def test_options_that_exclude_each_other(args: tuple[str, ...]) -> None:
    ended = env(*args)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr


def test_unknown_variables_of_rankwise_are_named_with_a_hint() -> None:
    ended = env(RANKWISE_RNK="3", RANKWISE_QQQ="\x1b[2J\n" + "x" * 1000)
    assert "RANKWISE_RNK is set, but rankwise does not read a variable of that name; did you mean RANKWISE_RANK?" in (
        ended.stdout
    )
    assert "RANKWISE_QQQ is set, but rankwise does not read a variable of that name\n" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) < 500  # with the paths of packages


def test_every_variable_of_rankwise_is_known() -> None:
    source = Path(rw.__file__).parent
    words = {word for path in source.rglob("*.py") for word in path.read_text().replace('"', " ").split()}
    named = {word.strip("`.,:;()[]{}='") for word in words if word.startswith("RANKWISE_")}
    read = {word.partition("=")[0] for word in named if word.partition("=")[0].replace("_", "").isupper()}
    assert read - {"RANKWISE_"} <= set(OWN_VARIABLES)


@pytest.mark.parametrize(
    ("variables", "chosen", "reasons"),
    [
        ({}, "none", {"none": "no other launcher's variables are set", "plain": "RANK is not set"}),
        (BATCH_SHELL, "none", {"slurm": "SLURM_STEP_ID is not set"}),
        (INTERACTIVE_STEP, "none", {"slurm": "SLURM_PROCID='0' and SLURM_STEP_ID='4294967290', which a rank"}),
        (
            MPICH_IN_SLURM,
            "mpich",
            {
                "mpich": "PMI_RANK and MPI_LOCALRANKID are set",
                "intelmpi": "I_MPI_HYDRA_UUID is not set",
                "slurm": "SLURM_PROCID and SLURM_STEP_ID are set too, but 'mpich' comes before it",
                "none": "the variables of another launcher are set",
            },
        ),
    ],
)
def test_explain_names_why_each_launcher_was_not_chosen(
    variables: dict[str, str], chosen: str, reasons: dict[str, str]
) -> None:
    found = json.loads(env("--explain", "--json", **variables).stdout)
    assert [one["name"] for one in found if one["chosen"]] == [chosen]
    given = {one["name"]: one["reason"] for one in found}
    assert list(given) == [launcher.name for launcher in rw.launchers()]
    for name, reason in reasons.items():
        assert given[name].startswith(reason)
    lines = lines_of(env("--explain", **variables))
    assert lines[chosen][0] == "chosen"


def test_explain_of_a_named_launcher() -> None:
    ended = env("--explain", "--launcher", "slurm", RANK="0", WORLD_SIZE="1")
    assert "it was named, but SLURM_PROCID is not set" in ended.stdout
    assert "'slurm' was named" in ended.stdout
    assert ended.returncode == 1
    assert "launcher='slurm' was asked for, but this process is not a task of a step" in ended.stderr


def test_launchers_lists_each_with_its_variables() -> None:
    found = json.loads(env("--launchers", "--json").stdout)
    assert [one["name"] for one in found] == [launcher.name for launcher in rw.launchers()]
    variables = {one["name"]: one["variables"] for one in found}
    assert "OMPI_COMM_WORLD_RANK" in variables["openmpi"]
    assert {"PMI_RANK", "MPI_LOCALRANKID"} <= set(variables["mpich"])
    assert {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(variables["slurm"])
    lines = lines_of(env("--launchers", RANK="garbage"))
    assert "OMPI_COMM_WORLD_RANK" in " ".join(lines["openmpi"])


class Documented:
    """A launcher whose variables are known from its documentation alone."""

    name = "documented"
    description = "documented run"
    variables = ("DOCUMENTED_RANK", "DOCUMENTED_SIZE")
    verified = False

    def present(self, environ: Mapping[str, str]) -> bool:
        return "DOCUMENTED_RANK" in environ

    def read(self, environ: Mapping[str, str]) -> LaunchEnvironment:
        raise NotImplementedError


def test_launchers_marks_those_that_were_never_seen() -> None:
    rows = launchers_table([Documented(), *rw.launchers()]).sections[0]
    assert rows[0] == ("documented", "documented run", "unverified", "DOCUMENTED_RANK DOCUMENTED_SIZE")
    seen = {row[0]: row[2] for row in rows}
    assert [seen[name] for name in ("torchrun", "openmpi", "mpich", "slurm")] == [""] * 4


def test_it_does_not_import_torch_or_rich() -> None:
    program = (
        "import sys; from rankwise.cli.main import main; main(sys.argv[1:], standalone_mode=False);"
        "sys.exit(bool({'torch', 'rich'} & set(sys.modules)))"
    )
    for option in ((), ("--json",), ("--explain",), ("--launchers",), ("--all",)):
        command = [sys.executable, "-c", program, "env", *option]
        assert subprocess.run(command, check=False, capture_output=True, env=clean_environ()).returncode == 0


def on_terminal(columns: int, *args: str, **variables: str) -> str:
    """Return the output of the command on a terminal of so many columns."""
    terminal, ours = pty.openpty()
    try:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environ = clean_environ(TERM="xterm", **variables)
        started = subprocess.Popen([RANKWISE, "env", *args], env=environ, stdout=ours)
    finally:
        os.close(ours)
    output = bytearray()
    try:
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(terminal, 65536):
                output += piece
        assert started.wait(SECONDS) == 0
    finally:
        os.close(terminal)
        started.kill()
        started.wait()
    return output.decode()


def test_a_terminal_gets_a_table_of_rich_and_a_pipe_plain_text() -> None:
    shown = on_terminal(100, RANKWISE_TABLE="[bold]")
    assert "│" in shown
    assert "[bold]" in shown, "cells are no markup"
    assert max(map(len, shown.splitlines())) < 130
    assert "│" not in on_terminal(0), "as Open MPI gives its ranks, whose output it passes on"
    assert "│" not in on_terminal(100, "--plain")
    assert "│" not in env().stdout
    assert "│" in env("--rich").stdout
    assert "│" not in env("--rich", "--json").stdout


def test_rich_that_is_not_installed_is_an_error_where_it_was_asked_for() -> None:
    program = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name: None if name == 'rich' else find(name);"
        "from rankwise.cli.main import main; main()"
    )
    for option, status in (("--rich", 1), ("--plain", 0)):
        command = [sys.executable, "-c", program, "env", option]
        ended = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
        assert ended.returncode == status, ended.stderr
    assert "rich" not in ended.stderr


@pytest.mark.parametrize("descriptor", ["1", "2"])
def test_closed_output_is_no_traceback(descriptor: str) -> None:
    command = ["sh", "-c", f'exec "$0" env {descriptor}>&-', RANKWISE]
    ended = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
