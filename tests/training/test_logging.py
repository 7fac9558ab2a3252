"""rankwise.logging: one rank in front of each line, most lines of rank zero alone."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.logging import configure
from tests.session.worlds import clean_environ, free_port
from tests.tables import each_row

PROGRAM = str(Path(__file__).parent / "programs" / "log_lines.py")
RANKWISE = str(Path(sys.executable).with_name("rankwise"))
LINES = {"INFO train: before", "INFO train: in", "INFO train: after", "WARNING train: careful"}


def lines_of(command: list[str], folder: Path, **variables: str) -> list[str]:
    ended = subprocess.run(
        [*command, PROGRAM, str(folder)], env=clean_environ(**variables), capture_output=True, text=True, timeout=200,
        check=True,
    )  # fmt: skip
    return ended.stderr.splitlines()


def test_lines_have_one_rank_under_the_launcher_and_the_file_of_each_rank_has_all(tmp_path: Path) -> None:
    port = str(free_port())
    for options in ((), ("--no-prefix",)):
        lines = lines_of([RANKWISE, "launch", "-n", "2", *options], tmp_path, MASTER_PORT=port)
        expected = {f"[0] {line}" for line in LINES} | {"[1] WARNING train: careful"}
        assert sorted(line for line in lines if "train" in line) == sorted(expected)
    for rank in range(2):
        text = (tmp_path / f"rank_{rank}.log").read_text()
        found = re.findall(rf"^\S+ \S+ \[{rank}\] (\w+ train: .*)$", text, re.MULTILINE)
        assert sorted(found) == sorted([*LINES, *LINES]), "the second launch appends"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Return the root logger, as it is without a test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.ranks("serial", 2)
def test_levels_and_handlers(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(root.handlers)
    configure("DEBUG", others=logging.ERROR)
    configure("debug", others="error")
    assert len(root.handlers) == len(before) + 1
    assert root.handlers[: len(before)] == before
    logging.getLogger("a").debug("detail")
    logging.getLogger("a").error("fault")
    shown = capsys.readouterr().err.splitlines()
    rank = rw.get_rank()
    assert shown == [f"[{rank}] {line}" for line in (["DEBUG a: detail"] if rank == 0 else []) + ["ERROR a: fault"]]


@each_row(
    ("arguments", "text"),
    [({"level": "LOUD"}, "level='LOUD'"), ({"others": None}, "others=None"), ({"folder": 3}, "folder=3")],
)
def test_odd_arguments_change_nothing(root: logging.Logger, arguments: dict[str, str], text: str) -> None:
    before = list(root.handlers)
    with pytest.raises(rw.InvalidArgumentError, match=text):
        configure(**arguments)
    assert root.handlers == before


def test_contradictory_variables_are_found_at_once(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    before = list(root.handlers)
    with pytest.raises(rw.LauncherEnvironmentError):
        configure()
    assert root.handlers == before
