"""The two pictures of ARCHITECTURE.md are true, and drop-ins are kept from every private module."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FrameType

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


# (name, module), in the order of the picture.
STEPS = [
    (name, "rankwise." + path.replace("/", "."))
    for name, path in (line.split()[:2] for line in blocks("Order in time")[0])
]


def test_the_picture_of_imports_is_the_contract() -> None:
    contracts = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    pictures = blocks("Order of imports")
    assert len(contracts) == len(pictures) == 2
    for contract, picture in zip(contracts, pictures, strict=True):
        assert [line.split("  ")[0] for line in picture] == re.findall(r'"([^"]+)"', contract)


def test_the_steps_of_the_picture_are_there() -> None:
    places = {(name, getattr(importlib.import_module(module), name).__module__) for name, module in STEPS}
    assert places == set(STEPS)


@pytest.mark.ranks(2)
def test_the_order_in_time_is_that_of_a_run() -> None:
    """The first call of each step, in a process that joins and calls collectives."""
    calls: dict[tuple[str, str], None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event != "call" or not module.startswith("rankwise."):
            return
        if name == "__init__":
            cls = type(frame.f_locals["self"])
            module, name = cls.__module__, cls.__name__
        calls.setdefault((name, module))

    sys.setprofile(record)
    try:
        with rw.init():
            rw.topology()
            rw.all_reduce(torch.ones(2))
            rw.sync_grads([torch.nn.Parameter(torch.ones(1))])
    finally:
        sys.setprofile(None)
    assert [step for step in calls if step in STEPS] == STEPS


def test_the_drop_ins_may_import_no_private_module() -> None:
    """Other than `extend._dropins`, which is for them."""
    contract = (ROOT / "pyproject.toml").read_text().partition("forbidden_modules = [")[2].partition("]")[0]
    private = {path.stem for path in SOURCE.iterdir() if path.name.startswith("_") and not path.name.startswith("__")}
    assert set(re.findall(r'"rankwise\.(\w+)"', contract)) == private
