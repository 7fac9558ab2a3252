"""Options of torchrun, and their variables."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from rankwise.cli.launch_command import launch
from rankwise.cli.main import main
from tests.session.worlds import clean_environ

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
DOCS = Path(__file__).parents[2] / "docs" / "launchers.md"
SHOW = "import os\nprint(os.environ['LOCAL_RANK'], os.environ['ROLE_NAME'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"


def run(folder: Path, *args: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RANKWISE, "launch", *args], cwd=folder, env=clean_environ(**variables), input=text,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_table_of_the_documentation_has_the_options_of_torchrun() -> None:
    table = dict(re.findall(r"^\| `(--[a-z-]+)` \| (?:`(PET_[A-Z_]+)`)? \|", DOCS.read_text(), re.MULTILINE))
    actions = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
    theirs = {
        next(name for name in action.option_strings if name.startswith("--")): (
            f"PET_{action.dest.upper()}" if isinstance(action, (env, check_env)) else ""
        )
        for action in actions
    }
    assert {name: table.get(name) for name in theirs} == theirs, "an option of torchrun is missing in the table"
    ours = {name: option for option in launch.params if isinstance(option, click.Option) for name in option.opts}
    for action in actions:
        for name in action.option_strings:
            assert name in ours
            assert (ours[name].envvar or "") == theirs[next(n for n in action.option_strings if n.startswith("--"))]


@pytest.mark.slow
def test_an_option_takes_precedence_over_its_variable(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    variables = {"PET_ROLE": "variable", "PET_NPROC_PER_NODE": "1", "PET_VIRTUAL_LOCAL_RANK": "1"}
    ended = run(tmp_path, "--role", "option", "show.py", CUDA_VISIBLE_DEVICES="5,7", **variables)
    assert ended.stdout == "0 option 5\n", "and the other variables are the values of their options"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PET_NPROC_PER_NODE", "two", "PET_NPROC_PER_NODE='two': 'two' is not a number"),
        ("PET_STANDALONE", "x", "PET_STANDALONE='x'"),
        (
            "PET_LOCAL_RANKS_FILTER",
            "0,7",
            "names rank 7, and of 1 ranks, which are counted from 0, the last is 0 (set outside",
        ),
        ("PET_EVENT_LOG_HANDLER", "console", "'console' has no meaning here: no events are recorded"),
        (
            "PET_LOG_LINE_PREFIX_TEMPLATE",
            "${rank}: ",
            "has no meaning here: what stands before the rank of each line is",
        ),
        ("PET_SIGNALS_TO_HANDLE", "SIGKILL", "'SIGKILL' is not a signal that can be handled"),
    ],
)
def test_an_error_names_the_variable(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    ended = CliRunner().invoke(main, ["launch", "missing.py"])
    assert ended.exit_code == 2
    assert said in ended.output
    assert name in ended.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("numa-binding", "node"), ("logs-specs", "x"), ("tee", "x"), ("tee", "0:4")],
        *[("log-line-prefix-template", "${rank}: "), ("print-completion", "bash")],
    ],
)
def test_an_option_without_a_meaning_says_what_to_use(name: str, value: str) -> None:
    ended = CliRunner().invoke(main, ["launch", f"--{name}", value, "missing.py"])
    assert ended.exit_code == 2
    assert f"--{name}" in ended.output


@pytest.mark.slow
def test_a_script_may_be_a_pipe_or_an_archive(tmp_path: Path) -> None:
    source = "import sys\nprint(sys.argv[1:], __name__, sys.stdin.read())\nif len(sys.argv) > 2:\n    1 / 0\n"
    ended = run(tmp_path, "-n", "2", "-", "a", text=source)
    assert sorted(ended.stdout.splitlines()) == ["[0] ['a'] __main__ ", "[1] ['a'] __main__ "]
    ended = run(tmp_path, "-", "a", "b", text=source)
    assert 'File "<stdin>", line 4, in <module>\n    1 / 0\n' in ended.stderr
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "print(__name__)\n")
    assert run(tmp_path, "app.pyz").stdout == "__main__\n"
    shell = f"{RANKWISE} launch -n 2 --no-prefix <(echo 'print(__file__[:7])')"
    assert subprocess.check_output(["bash", "-c", shell], env=clean_environ(), text=True) == "/dev/fd\n" * 2
