"""The types that type checkers infer for the public names, compared with the values."""

from __future__ import annotations

import runpy
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "public_types.py"


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types that a type is a union of, or itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in {typing.Union, types.UnionType} else (kind,)


@pytest.mark.slow
def test_mypy_knows_the_types_of_the_public_names(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """The first run reads torch, which takes a while."""
    cache = tmp_path if pytestconfig.cache is None else pytestconfig.cache.mkdir("mypy")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", str(PROGRAM)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_types_are_those_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each declared type is compared with the value at run time."""
    compared = []

    def compare(value: object, kind: object) -> object:
        kinds = tuple(getattr(one, "__origin__", one) for one in _alternatives(kind))
        assert isinstance(value, kinds), (value, kind)
        assert not isinstance(value, bool) or bool in kinds, (value, kind)
        compared.append(kind)
        return value

    monkeypatch.setattr(typing, "assert_type", compare)
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert len(compared) > 30
