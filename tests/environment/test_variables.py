"""The table of variables, beside what the readers read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import rankwise._environment
from rankwise._environment.variables import VARIABLES


def test_it_has_what_is_read_and_nothing_else() -> None:
    folder = Path(next(iter(rankwise._environment.__path__)))
    read = {
        node.value
        for path in folder.glob("*.py")
        if path.name != "variables.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {name for name in read if re.fullmatch(r"RANK|[A-Z0-9]+(_[A-Z0-9]+)+", name)}
    assert {name.removeprefix("RANKWISE_") for name in VARIABLES} == {name.removeprefix("RANKWISE_") for name in names}
