"""The language of the package: words that stand in for the noun that is meant, and names that occur twice."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankwise as rw

SOURCE = Path(rw.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[str]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


@pytest.mark.parametrize(
    ("word", "most"), [("what(ever)?", 2.0), ("say|says|said|saying", 1.0), ("tell|tells|told|telling", 1.0)]
)
def test_docstrings_name_things_by_their_nouns(word: str, most: float) -> None:
    """Counted in 1,000 words: "a unique id of this host", and not "what tells this host from others"."""
    words = [found.lower() for text in docstrings() for found in re.findall(r"[A-Za-z']+", text)]
    share = 1000 * sum(bool(re.fullmatch(word, found)) for found in words) / len(words)
    assert share < most


def test_no_two_classes_or_modules_have_one_name() -> None:
    """Of public classes; a module of a drop-in or of the plugin may not take the name of another module either."""
    classes = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []
    named_by_ignite = SOURCE / "compat" / "ignite" / "comp_models"
    modules = Counter(
        path.stem.lstrip("_") for path in MODULES if not path.stem.startswith("__") and path.parent != named_by_ignite
    )
    assert [name for name, count in modules.items() if count > 1] == []
