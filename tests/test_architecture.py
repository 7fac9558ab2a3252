"""The pictures and tables of ARCHITECTURE.md are true, and drop-ins are kept from every private module."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import rankwise as rw

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
SOURCE = ROOT / "src" / "rankwise"


def blocks(heading: str) -> list[list[str]]:
    """Return the lines of each picture under a heading, without those of arrows alone."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    pictures = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    return [[line for line in picture.splitlines() if line.strip(" │")] for picture in pictures]


# For each walk (name, module), in the order of its picture.
WALKS = [
    [(name, "rankwise." + path.replace("/", ".")) for name, path in (line.split()[:2] for line in lines)]
    for lines in blocks("Order in time")
]


def code_of(step: tuple[str, str]) -> CodeType:
    """Return the code of a step: of a function or method, or of the constructor of a class."""
    found = importlib.import_module(step[1])
    for name in step[0].split("."):
        found = getattr(found, name)
    assert found.__module__ == step[1]
    function: Any = found.__init__ if isinstance(found, type) else getattr(found, "__func__", found)
    code: CodeType = inspect.unwrap(function).__code__
    return code


def steps_of(walk: list[tuple[str, str]], program: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the steps of a walk in the order in which a program first comes to them."""
    steps = {code_of(step): step for step in walk}
    found: dict[tuple[str, str], None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in steps:
            found.setdefault(steps[frame.f_code])

    sys.setprofile(record)
    try:
        program()
    finally:
        sys.setprofile(None)
    return list(found)


def test_the_picture_of_imports_is_the_contract() -> None:
    contracts = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    pictures = blocks("Order of imports")
    assert len(contracts) == len(pictures) == 2
    for contract, picture in zip(contracts, pictures, strict=True):
        assert [line.split("  ")[0] for line in picture] == re.findall(r'"([^"]+)"', contract)


def test_the_steps_of_the_walks_are_there() -> None:
    assert len({code_of(step) for walk in WALKS for step in walk}) >= 38


def test_what_to_open_is_there() -> None:
    rows = PAGE.partition("| to change | open |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`([a-z_/]+)`", row.split("|")[2])]
    folders = [SOURCE, SOURCE / "_environment"]
    files = {name: [path for folder in folders for path in (folder / f"{name}.py", folder / name)] for name in named}
    assert len(named) >= 30
    assert not [name for name, paths in files.items() if not any(path.exists() for path in paths)]


def test_the_files_that_a_room_names_are_there() -> None:
    missing = []
    for room in SOURCE.glob("**/_*/**/__init__.py"):
        names = re.findall(r"`([a-z_0-9]+)`", ast.get_docstring(ast.parse(room.read_text())) or "")
        places = {name: (room.parent / name, room.parent / f"{name}.py") for name in names}
        missing += [(room, name) for name, paths in places.items() if not any(path.exists() for path in paths)]
    assert not missing


@pytest.mark.ranks(2)
def test_the_walk_of_init_is_that_of_a_run() -> None:
    def program() -> None:
        with rw.init():
            rw.topology()
            rw.all_reduce(torch.ones(2))
            rw.sync_grads([torch.nn.Parameter(torch.ones(1))])

    assert steps_of(WALKS[0], program) == WALKS[0]


@pytest.mark.ranks(2)
def test_the_walk_of_a_collective_is_that_of_a_run() -> None:
    with rw.init():
        rw.all_reduce(1)
        assert steps_of(WALKS[1], lambda: rw.all_reduce(1)) == WALKS[1]


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("0*.md"))


def test_the_drop_ins_may_import_no_private_module() -> None:
    """Other than `extend._dropins`, which is for them."""
    contract = (ROOT / "pyproject.toml").read_text().partition("forbidden_modules = [")[2].partition("]")[0]
    private = {path.stem for path in SOURCE.iterdir() if path.name.startswith("_") and not path.name.startswith("__")}
    assert set(re.findall(r'"rankwise\.(\w+)"', contract)) == private
