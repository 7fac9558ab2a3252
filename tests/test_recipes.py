"""The programs of the tutorial and the recipes run, and their commands print what the pages show.

A page has files, each a block below its name, and commands with their output. `...` stands for any text of a line, or
for any lines. What comes in two streams, or from two ranks, has no order. Slurm's recipe is tested in tests/clusters.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.lanes import variants
from tests.session.worlds import clean_environ

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/recipes/*.md"), ROOT / "docs" / "start.md", ROOT / "docs" / "before_and_after.md"])
BIN = Path(sys.executable).parent
MISSING = {
    "accelerator": "" if torch.accelerator.is_available() else "no accelerator",
    "editor": "no editor that speaks the Debug Adapter Protocol",
    "sbatch": "tests/clusters runs it",
    "terminal": "",
}
SECONDS = 200.0  # for hangs


def commands(page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what a block of commands needs, each of its commands, and the lines that are shown below it."""
    for needs, block in re.findall(r"(?:<!-- needs: (\w+) -->\n+)?```console\n(.*?)```", page.read_text(), re.DOTALL):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            yield needs, command, shown.splitlines()


@contextlib.contextmanager
def files(page: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Write the files of a page, and give the environment for its commands."""
    for name, text in re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        (folder / name).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    # A short path: loaders make sockets in it. A launch that a page has ended in the background may still use it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        yield clean_environ(PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", TMPDIR=temporary, COLUMNS="80")


def check(shown: Sequence[str], output: str, errors: str) -> None:
    """Compare the lines that are shown with those that came; without a line `...`, standard output has no others."""
    left = output.splitlines()
    others = errors.splitlines()
    for line in shown:
        if line != "...":
            pattern = ".*".join(map(re.escape, line.split("...")))
            found = [lines for lines in (left, others) if any(re.fullmatch(pattern, one) for one in lines)]
            assert found, f"{line!r} is not in\n{output}\n{errors}"
            found[0].remove(next(one for one in found[0] if re.fullmatch(pattern, one)))
    assert "..." in shown or left == [], "lines that are not shown"


def run(command: str, environ: dict[str, str], folder: Path) -> tuple[str, str]:
    """Run a command of a shell, and return its output and its errors. If it hangs, all that it has started ends."""
    with subprocess.Popen(
        ["sh", "-c", command],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


# `make docs-check` runs those of all pages.
IN_CI = [page for page in PAGES if page.stem == "hang"]


@pytest.mark.parametrize("page", variants(PAGES, slow=IN_CI), ids=lambda page: page.stem)
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    with files(page, tmp_path) as environ:
        for needs, command, shown in commands(page):
            if not needs:
                check(shown, *run(command, environ, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "needs", "command", "shown"),
    [
        pytest.param(page, needs, *rest, id=f"{page.stem}-{needs}")
        for page in PAGES
        for needs, *rest in commands(page)
        if needs
    ],
)
def test_commands_that_need_something(page: Path, needs: str, command: str, shown: list[str], tmp_path: Path) -> None:
    if MISSING[needs]:
        pytest.skip(MISSING[needs])
    with files(page, tmp_path) as environ:
        output = on_terminal(command, shown, environ, tmp_path)
    check([line for line in shown if not line.startswith("(Pdb)")], output, "")


def on_terminal(command: str, shown: Sequence[str], environ: dict[str, str], folder: Path) -> str:
    """Run a command on a terminal, answer its prompts as it is shown, and return what it has printed."""
    answers = [line.removeprefix("(Pdb) ") for line in shown if line.startswith("(Pdb) ")]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("sh", ["sh", "-c", command], environ)  # noqa: S606 - this is a shell's command
    output, deadline = "", time.monotonic() + SECONDS
    while select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            output += os.read(terminal, 65536).decode()
        except OSError:  # Linux's end of file
            break
        if answers and output.endswith("(Pdb) "):
            os.write(terminal, f"{answers.pop(0)}\n".encode())
    os.close(terminal)
    os.waitpid(process, 0)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r\n", "\n")


def test_every_recipe_shows_a_command() -> None:
    assert len(PAGES) > 18
    for page in PAGES:
        assert page.stem == "index" or list(commands(page)), page
